import asyncio
import errno
import json
from pathlib import Path

import pytest
from support.ledgers import configured

from headpond.config import RunConfig
from headpond.inspection.dead import FOLDER
from headpond.orchestrator.examples.retry_requests import RetryRequests
from headpond.orchestrator.ledger.ledger import Ledger


def config(run_dir: Path) -> RunConfig:
    return configured(run_dir=run_dir, environments={"noop": {"use": "noop"}})


def request(run_dir: Path, content: object) -> Path:
    (run_dir / FOLDER).mkdir(exist_ok=True)
    path = run_dir / FOLDER / "1-a.json"
    path.write_text(json.dumps(content))
    return path


def test_the_examples_of_a_request_are_played_again_and_its_file_is_deleted(ledger: Ledger, tmp_path: Path) -> None:
    ledger.state.environments["noop"].examples = 4
    path = request(tmp_path, {"until": 7, "examples": {"noop": [2, 9, "x"], "other": [1]}})
    asyncio.run(RetryRequests(config(tmp_path), ledger).run_once())
    assert list(ledger.state.environments["noop"].again) == [2]
    assert ledger.state.retried_group == 7
    assert not path.exists()


def test_a_request_whose_file_cannot_be_deleted_is_taken_once(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    ledger.state.environments["noop"].examples = 4
    request(tmp_path, {"until": 7, "examples": {"noop": [2]}})
    monkeypatch.setattr(Path, "unlink", refuse)
    requests, again = RetryRequests(config(tmp_path), ledger), ledger.state.environments["noop"].again
    asyncio.run(requests.run_once())
    again.forget(2)
    asyncio.run(requests.run_once())
    assert not again


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"until": 1},
        {"until": "x", "examples": {}},
        {"until": 1, "examples": 3},
        {"until": 1, "examples": {"noop": 3}},
    ],
)
def test_a_request_that_cannot_be_read_is_logged_once_and_stays(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: object
) -> None:
    path = request(tmp_path, content)
    requests = RetryRequests(config(tmp_path), ledger)
    for _ in range(3):
        asyncio.run(requests.run_once())
    assert [record.message.split()[0] for record in caplog.records] == ["action=retry_unreadable"]
    assert path.exists()


@pytest.mark.parametrize("call", ["is_dir", "read_bytes"])
def test_a_disk_that_fails_does_not_end_the_run_and_the_request_is_taken_later(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    ledger.state.environments["noop"].examples = 4
    path = request(tmp_path, {"until": 7, "examples": {"noop": [2]}})
    requests, again = RetryRequests(config(tmp_path), ledger), ledger.state.environments["noop"].again
    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fail)
        asyncio.run(requests.run_once())
    assert (path.exists(), list(again)) == (True, [])
    asyncio.run(requests.run_once())
    assert (path.exists(), list(again)) == (False, [2])
