"""`penstock demo`: a complete Penstock on this machine, from engine responses to a trainer's batches."""
