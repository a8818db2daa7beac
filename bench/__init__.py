"""Benchmarks of `python -m bench NAME`, one module each, measured against a baseline in the same run."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
