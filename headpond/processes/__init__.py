"""Operating system processes: children, embedded Redis, secrets, open files."""
