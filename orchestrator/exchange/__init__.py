"""What passes between the run and its workers: the connection to Redis, messages, input files, replies, gates."""
