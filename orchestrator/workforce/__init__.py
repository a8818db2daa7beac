"""Who works for the run: workers that are there, workers in quarantine, leases."""
