from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.waiting import Clock

from headpond.orchestrator.ledger.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the reconciler, the gates and the watch over progress."""
    clock = Clock()
    for module in ("reconciler", "exchange.gates", "reporting.stall"):
        monkeypatch.setattr(f"headpond.orchestrator.{module}.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock
