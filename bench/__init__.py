"""Benchmarks of `penstock bench NAME`, one module each, measured against a baseline in the same run."""
