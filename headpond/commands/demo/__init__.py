"""`headpond demo`: a complete Headpond on this machine, from engine responses to a trainer's batches."""
