"""HTTP processes: the session server and the dashboard."""
