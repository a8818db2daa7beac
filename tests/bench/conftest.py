"""Processes of a benchmark import `bench`, as `python -m bench` lets them."""

import pytest

from bench import ROOT


@pytest.fixture(autouse=True)
def _bench_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
