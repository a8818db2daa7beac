"""The event loop of a process: its lag, thread pools, cancellation and garbage collection."""
