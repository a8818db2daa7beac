"""A worker whose engine takes tokens builds its renderer before the first job."""

import logging
from pathlib import Path
from typing import Any

import pytest
from support.asking import run
from support.tokenizers_dir import tokenizer_dir

from penstock.config import RunConfig
from penstock.errors import StageError
from penstock.messages import RolloutJob
from tasks.playing import Player

JOB = RolloutJob(
    run="run", job="g0.r0", attempt=1, sequence=1, timeout_s=5, group="g0", environment="sums", example=0, seed=0
)


def config_of(tmp_path: Path, renderer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": tmp_path / "run",
            "environments": {"sums": {"use": "arithmetic"}},
            "engine": {"dialect": "generate"},
            "policy": {"renderer": renderer},
        }
    )


def test_a_renderer_is_warm_before_the_first_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tokenizer_dir(tmp_path / "tokenizer")

    async def main() -> None:
        with caplog.at_level(logging.INFO, logger="penstock.renderers"):
            async with Player(config_of(tmp_path, str(directory))).ready():
                assert f"action=renderer_built backend=directory model={directory}" in caplog.text

    run(main)


@pytest.mark.parametrize(
    ("renderer", "why"),
    [("/nowhere", r"/nowhere has no tokenizer\.json"), (None, r'engine\.dialect = "generate" takes tokens')],
)
def test_a_renderer_that_can_never_be_built_is_what_every_job_says(tmp_path: Path, renderer: Any, why: str) -> None:
    async def main() -> None:
        async with Player(config_of(tmp_path, renderer)).ready() as player:
            with pytest.raises(StageError, match=f"the worker cannot play: {why}"):
                await player.play(JOB, "aa")

    run(main)


def test_a_renderer_that_cannot_be_built_now_is_tried_again_by_the_first_rollout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tokenizer_dir(tmp_path / "tokenizer")
    (directory / "tokenizer.json").write_text("{")

    async def main() -> None:
        async with Player(config_of(tmp_path, str(directory))).ready():
            assert "action=not_warmed_up" in caplog.text

    run(main)
