"""What every process runs on: event loop, lag measurement, thread pools, child processes, embedded Redis."""
