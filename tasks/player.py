"""What the jobs of a rollout worker share: its environments, the engine's client, the servers of sessions.

A job names an environment, and the worker's own configuration defines it.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from headpond.config import RunConfig
from headpond.engines.http.client import EngineClient
from headpond.environments import agent_program, grading
from headpond.environments.loading import LoadedEnvironment, load_environments
from headpond.errors import ConfigError, InfrastructureFailure, StageError
from headpond.event_loop.offload import in_io_thread
from headpond.playing.agent_sessions import SessionServers
from headpond.playing.rollout import PlayResources, open_dialect
from headpond.store import open_store
from headpond.store.opening import owner_of

logger = logging.getLogger("headpond.tasks")


class Player:
    """One per process. `ready` opens what its rollouts share."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.environments: dict[str, LoadedEnvironment] = {}
        self._broken: str | None = None
        self._resources: PlayResources | None = None
        self._run_of_store: str | None = None

    @asynccontextmanager
    async def ready(self) -> AsyncGenerator["Player"]:
        dialect = None
        try:
            self.environments = await in_io_thread(_load_environments, self._config)
            dialect = await open_dialect(self._config)
            agent_program.run_as(self._config.rollouts.agent_user)
            self._warn_of_root()
        except ConfigError as error:
            self._broken = str(error)  # the reply to every job, so that the orchestrator stops with it
        config = self._config
        grading.install(config.rollouts.graders)
        try:
            async with EngineClient.open(config.engine) as client, SessionServers.open(config.sessions) as sessions:
                if dialect:
                    store = open_store(config.store_url)
                    self._resources = PlayResources(
                        client=client,
                        store=store,
                        settings=config.policy,
                        dialect=dialect,
                        sessions=sessions,
                        recording=config.sessions,
                        fields=config.batch.declared_fields,
                    )
                yield self
        finally:
            await self._close_environments()

    def check(self) -> None:
        """ConfigError if no job can be played."""
        if self._broken is not None:
            raise ConfigError(self._broken)

    async def require_store_of(self, run: str) -> None:
        """Fail if the store of this host is not the run's: other processes could not read the files."""
        if run != self._run_of_store:
            store = open_store(self._config.store_url)
            found = await in_io_thread(owner_of, store)
            if found != run:
                whose = f"belongs to run {found}" if found else "belongs to no run"
                raise InfrastructureFailure(
                    f"the store of this worker, {store}, {whose}, and the job is of run {run}: mount the run's store "
                    "there, or set `store`, and restart the worker"
                )
            self._run_of_store = run

    def resources_of(self, environment: str) -> PlayResources:
        """An evaluation has sampling parameters of its own, and nothing for the trainer is missing in it."""
        assert self._resources is not None, "`ready` opens it before the first job"
        evaluation = self._config.evaluation.get(environment)
        if evaluation is None:
            return self._resources
        settings = self._resources.settings
        if evaluation.sampling is not None:
            settings = settings.model_copy(update={"sampling": evaluation.sampling})
        return replace(self._resources, settings=settings, trained=False)

    def _warn_of_root(self) -> None:
        if os.geteuid() == 0 and not self._config.rollouts.agent_user:
            agents = ",".join(name for name, each in self.environments.items() if each.external_agent)
            if agents:
                logger.warning(
                    "action=agents_are_root environments=%s: their programs can read this worker's secrets; "
                    "set rollouts.agent_user, or run the worker as another user",
                    agents,
                )

    async def _close_environments(self) -> None:
        """Concurrently: each may wait for processes."""
        closing = [each.close() for each in self.environments.values()]
        results = await asyncio.gather(*closing, return_exceptions=True)
        for name, error in zip(self.environments, results, strict=True):
            if error is not None:
                logger.error("action=not_closed environment=%s error=%s", name, error)

    def environment(self, name: str) -> LoadedEnvironment:
        """StageError, with what to do, if this worker cannot play it."""
        if self._broken is not None:
            raise StageError(f"the worker cannot play: {self._broken}")
        if name not in self.environments:
            known = ", ".join(sorted(self.environments.keys() | self._config.environments.keys()))
            raise StageError(f"this worker has no environment {name!r}, only {known}: add it to its configuration")
        environment = self.environments[name]
        if environment.external_agent and not self._config.sessions.urls:
            raise StageError(
                f"environment {name!r} runs its own agent: set sessions.urls (HEADPOND_SESSIONS__URLS) to the URL of "
                "`headpond sessions`"
            )
        required = [field for field in self._config.batch.fields_of("score") if field.default is None]
        if environment.external_agent and required and name not in self._config.evaluation:
            raise StageError(
                f"environment {name!r} runs its own agent, which has no Score.columns: set "
                f"{required[0].setting}.default"
            )
        return environment


def _load_environments(config: RunConfig) -> dict[str, LoadedEnvironment]:
    """Those of the run, or the built-in ones if there are none; and those of evaluations. Blocks."""
    loaded = load_environments(config.environments, config.place_of)
    if config.evaluation:
        loaded |= load_environments(config.evaluation, config.place_of, section="evaluation")
    return loaded
