"""The engine's replicas as the run sees them: their weights, their load, and whether they may serve."""
