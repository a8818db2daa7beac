"""Processes, readings and loads that the benchmarks share."""
