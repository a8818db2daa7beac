"""The start and the end of a rollout worker: its renderer and its environments."""

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
from support.engine_clients import run
from support.tokenizer_directory import tokenizer_dir

from headpond.config import RunConfig
from headpond.errors import StageError
from headpond.tasks.player import Player
from headpond.tasks.stage import Call
from headpond.tasks.stages.play import PlayMessage, play

JOB = PlayMessage(run="run", job="g0.r0", attempt=1, sequence=1, timeout_s=5, environment="sums", example=0, seed=0)


def config_of(tmp_path: Path, renderer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": tmp_path / "run",
            "environments": {"sums": {"use": "arithmetic"}},
            "engine": {"dialect": "generate"},
            "policy": {"renderer": renderer},
        }
    )


def test_the_renderer_is_built_before_the_first_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tokenizer_dir(tmp_path / "tokenizer")

    async def main() -> None:
        with caplog.at_level(logging.INFO, logger="headpond.renderers"):
            async with Player(config_of(tmp_path, str(directory))).ready():
                assert f"action=renderer_built backend=directory model={directory}" in caplog.text

    run(main)


@pytest.mark.parametrize(
    ("renderer", "why"),
    [
        ("/nowhere", r"/nowhere has no tokenizer\.json"),
        (None, r"configuration: engine\.dialect = 'generate' sends tokens"),
    ],
)
def test_every_job_fails_with_the_error_of_an_unusable_renderer(tmp_path: Path, renderer: Any, why: str) -> None:
    async def main() -> None:
        config = config_of(tmp_path, renderer)
        async with Player(config).ready() as player:
            with pytest.raises(StageError, match=f"the worker cannot play: {why}"):
                await play(Call(message=JOB, execution="aa", config=config, opened=player))

    run(main)


def test_every_job_fails_with_the_error_of_an_unusable_dialect(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"run_dir": tmp_path, "engine": {"dialect": "headpond.errors:Upstream"}})

    async def main() -> None:
        async with Player(config).ready() as player:
            with pytest.raises(StageError, match=r"cannot play: configuration: engine\.dialect .* is not a subclass"):
                await play(Call(message=JOB, execution="aa", config=config, opened=player))

    run(main)


def test_a_renderer_that_cannot_be_built_now_does_not_stop_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tokenizer_dir(tmp_path / "tokenizer")
    (directory / "tokenizer.json").write_text("{")

    async def main() -> None:
        async with Player(config_of(tmp_path, str(directory))).ready():
            assert "action=not_warmed_up" in caplog.text

    run(main)


MODULE = """
class Closing:
    examples = [1]
    closed = []

    def __init__(self, *, name: str) -> None:
        self.name = name

    async def rollout(self, example, policy):
        return 1.0

    async def close(self):
        self.closed.append(self.name)
        if self.name == "first":
            raise OSError("no more")
"""


def test_all_environments_are_closed_although_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "closing_environment.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    environments = {
        name: {"use": "closing_environment:Closing", "options": {"name": name}} for name in ("first", "second")
    }
    config = RunConfig.model_validate(
        {"run_dir": tmp_path / "run", "environments": {**environments, "sums": {"use": "arithmetic"}}}
    )
    closed = importlib.import_module("closing_environment").Closing.closed

    async def main() -> None:
        async with Player(config).ready():
            assert closed == []

    run(main)
    assert sorted(closed) == ["first", "second"]
    assert "action=not_closed environment=first" in caplog.text
    assert "OSError: no more" in caplog.text
