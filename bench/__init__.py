"""The benchmarks of `penstock bench NAME`: each measures itself beside a baseline in the same run."""
