"""Names that processes share in Redis: the queues of jobs and the keys."""
