"""The base of every process: event loop, lag measurement, thread pools, child processes, embedded Redis."""
