"""Run by `make test-torch`, in an environment with torch and TRL, without the other tests' conftest."""

import sys
from pathlib import Path

import support  # noqa: F401 - found before its directory is taken off the path

TESTS = Path(__file__).parents[1]
# TRL asks whether `vllm` can be imported: the directory tests/vllm must not answer.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != TESTS]
