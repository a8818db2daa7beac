"""Engine clients with short delays, and rollout stages over them with a real store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from headpond.config.engine import Engine, Policy
from headpond.engines.dialects import dialect_of
from headpond.engines.http.client import EngineClient
from headpond.environments.loading import LoadedEnvironment
from headpond.event_loop.factory import event_loop_factory
from headpond.fields import TrainerField
from headpond.playing.rollout import Attempt, PlayResources
from headpond.renderers import PooledRenderer
from support.stores import directory_store


def run(main: Callable[[], Coroutine[Any, Any, None]], *, concurrency: int = 8) -> None:
    with asyncio.Runner(loop_factory=event_loop_factory(concurrency=concurrency)) as runner:
        runner.run(main())


def quick_engine(*urls: str, **changes: Any) -> Engine:
    return Engine(urls=urls, **{"retry_first_s": 0.001, "retry_most_s": 0.01, "unreachable_s": 0.1, **changes})


def assert_idle(client: EngineClient) -> None:
    """The client holds no bytes and has no request in flight."""
    assert (client.budget.used, client.budget.waiting) == (0, 0)
    assert all(replica.in_flight == 0 for replica in client.replicas.all)


@contextlib.asynccontextmanager
async def stage_of(
    root: Path, *urls: str, policy: Policy | None = None, fields: tuple[TrainerField, ...] = (), **engine: Any
) -> AsyncIterator[PlayResources]:
    async with EngineClient.open(quick_engine(*urls, **engine)) as client:
        settings = policy or Policy()
        renderer = settings.renderer and PooledRenderer.of(settings.renderer, client.settings.model)
        dialect = dialect_of(client.settings, renderer=renderer)
        yield PlayResources(
            client=client, store=directory_store(root), settings=settings, dialect=dialect, fields=fields
        )
        assert_idle(client)


def attempt_of(rollout: str = "r1", *, attempt: int = 1, timeout_s: float = 60.0) -> Attempt:
    return Attempt(run="run", rollout=rollout, attempt=attempt, execution="aa", seed=0, timeout_s=timeout_s)


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def loaded(environment: Any, *, name: str = "test") -> LoadedEnvironment:
    examples = getattr(environment, "examples", ["only"])
    return LoadedEnvironment(name=name, environment=environment, examples=list(examples))
