"""`Verifiers`: an environment that plays tasks of the package `verifiers`, which runs in a child
process."""

import asyncio
from collections.abc import Sequence
from typing import Any

from headpond.environments.protocol import AgentPolicy, Score
from headpond.environments.verifiers.verifiers_process import VerifiersProcess
from headpond.environments.verifiers.wire import Outcome, Settings
from headpond.errors import ConfigError, EngineUnreachable, InfrastructureFailure, PolicyFailure, StageError
from headpond.event_loop.offload import in_io_thread

FAILURES = {
    Outcome.POLICY: PolicyFailure,
    Outcome.INFRASTRUCTURE: InfrastructureFailure,
    Outcome.UNREACHABLE: EngineUnreachable,
}


class Verifiers:
    """Plays tasks of the package. `taskset` and `harness` are the package's ids: importable
    modules. `config` is the package's `env` block. `size` limits the tasks to the first ones;
    `metrics` selects the package's metrics (default: all)."""

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
        """Task indices. The tasks themselves stay in the child process."""
        return range(self._process.examples)

    async def rollout(self, example: int, policy: AgentPolicy) -> Score:
        process = await self._running_process()
        result = await process.play(example, policy)
        if result.outcome is not Outcome.SCORED:
            raise FAILURES.get(result.outcome, StageError)(result.reason)
        selected = result.metrics if self._metrics is None else self._metrics
        metrics = {name: value for name, value in result.metrics.items() if name in selected}
        return Score(reward=result.reward, rewards=result.rewards, metrics=metrics)

    async def close(self) -> None:
        if self._restarting is not None:
            await asyncio.wait([self._restarting])
        await self._process.close()

    async def _running_process(self) -> VerifiersProcess:
        """Return the process. A dead one is replaced once for all waiting rollouts."""
        if not self._process.is_running:
            if self._restarting is None:
                self._restarting = asyncio.create_task(self._restart())
            self._process = await asyncio.shield(self._restarting)
        return self._process

    async def _restart(self) -> VerifiersProcess:
        try:
            return await in_io_thread(VerifiersProcess, self._settings)
        except ConfigError as error:
            raise InfrastructureFailure(f"the environment's process died and cannot be restarted: {error}") from error
        finally:
            self._restarting = None
