"""A server's replicas: load, weights, which may serve. The orchestrator uses this room."""
