"""The check of an engine that gave no answer at the start of a run. The child is a script that answers from a file."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.engine_clients import run
from support.ledgers import configured
from support.upstream import Response, serving

from headpond.errors import RunError
from headpond.orchestrator.serving import engine_check
from headpond.orchestrator.serving.engine_check import BUSY_LOOKS, EngineCheck

CHILD = """\
import pathlib, sys
first, *rest = pathlib.Path(sys.argv[1]).read_text().splitlines()
pathlib.Path(sys.argv[1]).write_text("\\n".join(rest or [first]))
print(first)
"""


def checked(directory: Path, monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any]) -> list[str]:
    """The answers that no child has given when the check is over. The last one is repeated."""
    monkeypatch.setattr(engine_check, "AGAIN_S", 0.0)
    file = directory / "answers"
    file.write_text("\n".join(map(json.dumps, answers)))

    async def main() -> None:
        check = EngineCheck(configured(engine={"urls": [server.url]}), [sys.executable, "-c", CHILD, str(file)])
        assert check.pending
        assert "rollouts begin when" in str(check.troubles())
        async with asyncio.timeout(60):
            await check.run()
        assert (check.pending, check.troubles()) == (False, [])

    with serving(lambda _: Response(body=b"{}")) as server:
        run(main)
    return file.read_text().splitlines()


@pytest.mark.parametrize("first", [{"away": "cannot be reached"}, {"busy": "did not answer within 20 s"}], ids=str)
def test_a_check_without_an_answer_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: dict[str, Any]
) -> None:
    with pytest.raises(RunError, match="its logprobs are raw"):
        checked(tmp_path, monkeypatch, first, {"refused": "its logprobs are raw"})


def test_an_engine_that_stays_busy_does_not_keep_the_run_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = checked(tmp_path, monkeypatch, *[{"busy": "did not answer within 20 s"}] * BUSY_LOOKS, {"notes": []})
    assert len(left) == 1
    assert "action=engine_unchecked did not answer within 20 s" in caplog.text


def test_what_the_check_notes_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked(tmp_path, monkeypatch, {"notes": ["environments with tools fail"]})
    assert "action=engine_noted environments with tools fail" in caplog.text
