"""HTTP processes: the session server and a small inference server."""
