"""Rollouts of a real engine, played in this process as a rollout worker plays them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from headpond.config import RunConfig
from headpond.ids import OWNER_KEY
from headpond.records.rollout import RolloutResult
from headpond.store.columns import Columns, read_columns
from headpond.store.files import FileStore
from headpond.tasks.player import Player
from headpond.tasks.stage import Call
from headpond.tasks.stages.play import PlayMessage, play
from headpond.turn import Message
from support import alignment
from support.engine_clients import run
from support.stores import run_store
from support.vllm_server import AnyEngine
from support.waiting import unless_failed

ENVIRONMENT = "tests.support.vllm_environments:Dialogue"
RUN = "run"
"""Of every job."""
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
"""Request fields for completions without a thought before them."""
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Played:
    result: RolloutResult
    store: FileStore

    @cached_property
    def columns(self) -> Columns:
        assert self.result.columns is not None, self.result
        return read_columns(self.store, self.result.columns)

    @property
    def samples(self) -> list[alignment.Sample]:
        return alignment.of_rollout(self.store, self.result)

    @property
    def answers(self) -> list[Message]:
        """The assistant's messages of the last sample."""
        conversations: list[list[Message]] = orjson.loads(self.columns.conversation.tobytes())
        return [message for message in conversations[-1] if message["role"] == "assistant"]

    @property
    def completions(self) -> list[list[int]]:
        """Sampled tokens of each turn."""
        turns = self.columns.turns
        spans = zip(turns.start.tolist(), turns.end.tolist(), strict=True)
        return [self.columns.input_ids[start:end].tolist() for start, end in spans]

    @property
    def finish_reasons(self) -> list[str]:
        turns = self.columns.turns
        return [turns.words["finish_reason"][index] for index in turns.finish_reason.tolist()]


@dataclass(kw_only=True)
class Table:
    """Where rollouts are played: an engine, a store, settings by section."""

    engine: AnyEngine
    directory: Path
    settings: dict[str, dict[str, Any]]
    more: dict[str, Any] = field(default_factory=lambda: dict(PLAIN))
    """fields of every request"""
    jobs: int = 0

    def config(
        self, sampling: dict[str, Any], more: dict[str, Any], options: dict[str, Any], seeded: bool
    ) -> RunConfig:
        sections = {name: dict(values) for name, values in self.settings.items()}
        engine = {"urls": [self.engine.url], "model": self.engine.model, "retry_first_s": 0.05, "unreachable_s": 5.0}
        policy = {
            "seeded": seeded,
            **sections.pop("policy", {}),
            "sampling": {"max_tokens": 48, **sampling, "more": more},
        }
        return RunConfig.model_validate(
            {
                "run_dir": self.directory / "run",
                "store": (self.directory / "store").absolute().as_uri(),
                "environments": {"dialogue": {"use": ENVIRONMENT, "options": options}},
                "engine": engine | sections.pop("engine", {}),
                "policy": policy,
                **sections,
            }
        )

    def play(
        self,
        count: int = 1,
        *,
        seed: int | None = None,
        version: int = 0,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
        sampling: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Played]:
        """`count` rollouts at once. `version` is that of the jobs; `options` are the environment's. With a `seed`, all
        rollouts have the same name and example, and so the same seeds."""
        config = self.config(sampling or {}, self.more if more is None else more, options, seed is not None)
        results: list[RolloutResult] = []
        run_store(config).write(OWNER_KEY, RUN.encode())

        async def main() -> None:
            async with Player(config).ready() as player:
                jobs = [self._job(seed, version) for _ in range(count)]
                playing = [
                    asyncio.create_task(
                        play(Call(message=job, execution=f"{job.sequence:08x}", config=config, opened=player))
                    )
                    for job in jobs
                ]
                try:
                    if meanwhile:
                        await unless_failed(meanwhile(), playing)
                    results.extend(await asyncio.gather(*playing))
                finally:
                    for task in playing:
                        task.cancel()
                    await asyncio.wait(playing)

        run(main, concurrency=count)
        return [Played(result, run_store(config)) for result in results]

    def _job(self, seed: int | None, version: int) -> PlayMessage:
        self.jobs += 1
        number = self.jobs if seed is None else 0
        return PlayMessage(
            run=RUN,
            job=f"g{number}.r0",
            attempt=1,
            sequence=self.jobs,
            timeout_s=TIMEOUT_S,
            environment="dialogue",
            example=number % 7,
            seed=seed or 0,
            policy_version=version,
        )
