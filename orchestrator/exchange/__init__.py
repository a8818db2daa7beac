"""What passes between the run and its workers: the connection to Redis, input files, replies, gates."""
