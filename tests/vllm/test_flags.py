"""Servers that were started with other flags: what works, and what the error says."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.alignment import Reference, align, weights_of
from support.vllm_playing import RUN, Table
from support.vllm_server import VllmServer

from headpond.config.engine import Engine
from headpond.engines.replicas.control import EngineControl
from headpond.errors import InfrastructureFailure

pytestmark = pytest.mark.slow

PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
MODE = ("--logprobs-mode", "processed_logprobs")


def test_a_server_without_the_flags(
    start_server: Callable[..., VllmServer], models: Path, reference: Reference, tmp_path: Path
) -> None:
    """Neither parsers, `generate`, a prefix cache nor processed logprobs."""
    server = start_server("dense/0", "--no-enable-prefix-caching", without=(*PARSERS, *MODE, "--enable-scale-out"))
    table = Table(engine=server, directory=tmp_path, settings={"engine": {}})

    with pytest.raises(InfrastructureFailure, match="--enable-auto-tool-choice"):
        table.play(tools=True)

    played = table.play(4, turns=3)
    assert server.metric("vllm:prefix_cache_hits_total") == 0
    samples = [sample for each in played for sample in each.samples]
    assert not align(samples, reference, weights_of(models, "dense")).problems

    (raw,) = table.play(sampling={"temperature": 0.6})
    assert align(raw.samples, reference, weights_of(models, "dense")).problems, "logprobs before temperature"

    table.settings = {"engine": {"dialect": "generate"}, "policy": {"renderer": str(models / "tokenizer")}}
    table.more = {}
    with pytest.raises(InfrastructureFailure, match="--enable-scale-out"):
        table.play()


def test_lora_adapters(
    start_server: Callable[..., VllmServer], models: Path, reference: Reference, tmp_path: Path
) -> None:
    """A new name for each version, which requests name; the engine serves both."""
    runtime = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    server = start_server("dense/0", "--enable-lora", "--max-loras", "3", "--max-lora-rank", "8", variables=runtime)
    settings = {"lora": True, "weight_update": "headpond"}
    for version in (1, 2):
        asyncio.run(load_adapter(Engine(urls=(server.url,), **settings), models / "lora" / str(version), version))
        table = Table(engine=server, directory=tmp_path / str(version), settings={"engine": settings})
        played = table.play(4, turns=2, version=version)
        samples = [sample for each in played for sample in each.samples]
        weights, adapters = {version: models / "dense" / "0"}, {version: models / "lora" / str(version)}
        found = align(samples, reference, weights, adapters=adapters)
        assert not found.problems, found.problems[:5]
        assert found.tokens > found.left_out == 0
        assert align(samples, reference, weights).problems, "the adapter changes nothing"


async def load_adapter(engine: Engine, adapter: Path, version: int) -> None:
    async with EngineControl.open(engine) as control:
        await control.load(engine.urls[0], weights=str(adapter), version=version, run=RUN, timeout_s=60.0)
