"""`penstock demo`: a whole Penstock on this machine, from an engine's answers to a trainer's batches."""
