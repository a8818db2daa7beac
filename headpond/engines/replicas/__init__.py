"""A server's replicas: load, weights, fitness to serve. The orchestrator uses this room."""
