"""The run's side of every stage: `pipeline.py` has their order."""
