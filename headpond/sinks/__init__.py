"""Steps of a run for W&B, TensorBoard and trackio: a process that follows metrics.jsonl, and what starts it."""
