import asyncio
import json
from pathlib import Path

import pytest
from support.ledgers import admitted

from orchestrator import sealing
from orchestrator.ledger import Ledger
from orchestrator.sealing import Sealer
from penstock.errors import RunLocked
from penstock.messages import EncodeResult

RANKS = [EncodeResult(file=f"rank_{rank}", samples=2, loss_tokens=20) for rank in range(2)]


def test_a_manifest_says_what_a_step_is_made_of(ledger: Ledger) -> None:
    group = admitted(ledger)
    content = json.loads(sealing.manifest("run", ledger.compose(0, [group]), RANKS))
    assert content["groups"] == {group.id: {"ordinal": 1, "environment": "noop", "example": 0, "size": 4}}
    assert content["rollouts"][f"{group.id}-3"] == {"group": group.id, "advantage": 1.5}
    assert content["totals"] == {"rollouts": 4, "groups": 1, "samples": 4, "loss_tokens": 40}


def test_a_manifest_is_never_replaced(tmp_path: Path) -> None:
    path = sealing.manifest_path(tmp_path, 0)
    sealing.seal(path, b"first")
    sealing.seal(path, b"first")
    with pytest.raises(RunLocked, match="does a second orchestrator drive this run"):
        sealing.seal(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]


def test_a_disk_that_takes_nothing_is_waited_for(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sealer = Sealer(tmp_path, "run")
    batch = ledger.compose(0, [admitted(ledger)])
    blocked = tmp_path / "batches"
    blocked.touch()
    for _ in range(3):
        assert not asyncio.run(sealer.seal(batch, RANKS))
    assert sealer.trouble is not None
    assert sealer.trouble.startswith("the manifest of step 0 cannot be written (")
    assert sealer.trouble.endswith(f"make room or mend the disk of {tmp_path}; nothing is lost")
    assert caplog.text.count("action=sealing_waits") == 1
    blocked.unlink()
    assert asyncio.run(sealer.seal(batch, RANKS))
    assert sealer.trouble is None
    assert list(sealing.manifests(tmp_path)) == [0]
