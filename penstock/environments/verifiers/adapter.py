"""The environment that plays tasks of `verifiers`: starts its process, asks it, and puts its answers into our words."""

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.environments.protocol import AgentPolicy
from penstock.environments.scores import Score
from penstock.environments.verifiers.verifiers_process import VerifiersProcess
from penstock.environments.verifiers.wire import Answer, Kind, Settings
from penstock.errors import ConfigError, EngineUnreachable, InfrastructureFailure, PolicyFailure, StageError
from penstock.runtime.offload import in_io_thread

FAILURES = {
    Kind.POLICY: PolicyFailure,
    Kind.INFRASTRUCTURE: InfrastructureFailure,
    Kind.UNREACHABLE: EngineUnreachable,
}


class Verifiers:
    """`taskset` and `harness` are the package's ids: a module that it can import. `config` is its own `env` block.

    `size` takes the first so many tasks, `metrics` those of its metrics that travel with a rollout (default: all).
    """

    external_agent = True

    def __init__(
        self,
        *,
        taskset: str,
        harness: str | None = None,
        size: int | None = None,
        metrics: list[str] | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        self._settings = Settings(taskset=taskset, harness=harness, size=size, config=config or {})
        self._metrics = metrics
        self._process = VerifiersProcess(self._settings)
        self._restarting: asyncio.Task[VerifiersProcess] | None = None

    @property
    def examples(self) -> Sequence[int]:
        """The tasks stay in their process."""
        return range(self._process.examples)

    async def rollout(self, example: int, policy: AgentPolicy) -> Score:
        process = await self._living()
        answer = await process.play(example, policy)
        if answer.kind is not Kind.SCORED:
            raise FAILURES.get(answer.kind, StageError)(answer.why)
        return Score(reward=answer.reward, rewards=answer.rewards, metrics=self._chosen(answer))

    async def close(self) -> None:
        if self._restarting is not None:
            await asyncio.wait([self._restarting])
        await self._process.close()

    def _chosen(self, answer: Answer) -> dict[str, float]:
        return {name: value for name, value in answer.metrics.items() if self._metrics is None or name in self._metrics}

    async def _living(self) -> VerifiersProcess:
        """A process that died is replaced once, however many rollouts wait for it."""
        if not self._process.is_living:
            if self._restarting is None:
                self._restarting = asyncio.create_task(self._restart())
            self._process = await asyncio.shield(self._restarting)
        return self._process

    async def _restart(self) -> VerifiersProcess:
        try:
            return await in_io_thread(VerifiersProcess, self._settings)
        except ConfigError as error:
            raise InfrastructureFailure(f"the environment's process died and does not start again: {error}") from error
        finally:
            self._restarting = None
