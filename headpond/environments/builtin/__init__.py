"""The environments that a worker plays when none is configured."""
