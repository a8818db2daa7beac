"""What processes agree on in Redis: the queues of jobs, and the names of keys."""
