"""Engine clients for tests: short delays between retries, and a check that nothing is held at the end."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headpond.config.engine import Engine
from headpond.engines.client import EngineClient
from headpond.runtime.event_loop import event_loop_factory


def run(main: Callable[[], Coroutine[Any, Any, None]], *, concurrency: int = 8) -> None:
    with asyncio.Runner(loop_factory=event_loop_factory(concurrency=concurrency)) as runner:
        runner.run(main())


def quick_engine(*urls: str, **changes: Any) -> Engine:
    return Engine(urls=urls, **{"retry_first_s": 0.001, "retry_most_s": 0.01, "unreachable_s": 0.1, **changes})


def assert_idle(client: EngineClient) -> None:
    """The client holds no bytes and has no request in flight."""
    assert (client.budget.used, client.budget.waiting) == (0, 0)
    assert all(replica.in_flight == 0 for replica in client.replicas.all)
