"""The control endpoints of a server's replicas: they report the weights of each, and load others.

The dialect names the endpoints (`Dialect.control`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import orjson

from headpond.config.engine import Engine
from headpond.engines.dialects import load_dialect
from headpond.engines.replicas.load import METRICS_PATH, Load, read_load
from headpond.engines.replicas.selection import Orders, Replica
from headpond.engines.weights import FAILED, LOADING, START_VERSION, Call, ControlCalls, WeightLabel, label_of
from headpond.errors import InfrastructureFailure
from headpond.event_loop.cancellation import run_to_completion

__all__ = [
    "LOADING",
    "POLL_S",
    "START_VERSION",
    "UNREACHABLE",
    "EngineControl",
    "Load",
    "Orders",
    "Replica",
    "WeightLabel",
    "label_of",
    "polling",
    "read_page",
    "reload_advice",
]

POLL_S = 1.0
LOAD_S = 2.0  # between two polls of a replica's load
LEAST_PAUSE_S, FAILED_PAUSE_S = 0.05, 0.2  # between polls that are waited for
ANSWER_S = 5.0  # limit of a poll; while weights are loaded, vLLM answers none
RESUME_S = 30.0  # limit after a failed update: vLLM on a busy machine took longer than 5 s
ANSWER_BYTES = 1 << 20
ERROR_CHARACTERS = 300
ADAPTERS_KEPT = 3  # newest versions that stay: a process that has not polled the newest one yet names one before
RESET_ATTEMPTS, RESET_PAUSE_S = 5, 0.2
UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)
EARLIER_RUN = "Weights of an earlier run"  # a heading of docs/engines.md
ABSENT = frozenset({404, 405, 501})


class EngineControl:
    """Calls of the control endpoints, over connections of their own: requests that wait for a
    connection do not delay them."""

    def __init__(self, http: aiohttp.ClientSession, calls: ControlCalls, *, lora: bool = False) -> None:
        """`lora`: weights are LoRA adapters, one for each version."""
        self._lora = lora
        self._http = http
        self._calls = calls
        self._version_path: dict[str, str] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Engine) -> "AsyncIterator[EngineControl]":
        """ConfigError if the dialect cannot be loaded."""
        calls = load_dialect(settings.dialect).control
        key = settings.api_key
        headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s)
        async with aiohttp.ClientSession(
            # Each call opens a new connection: over an old one, a balancer of connections would
            # always show the same of its servers.
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=timeout,
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as http:
            yield cls(http, calls, lora=settings.lora)

    async def label(self, url: str) -> WeightLabel | None:
        """The label of the replica's weights; None if it reports none. Raises UNREACHABLE."""
        if self._lora:
            adapters = await self._adapters(url)
            return WeightLabel.parse(adapters[-1] if adapters else "")
        cached_path = self._version_path.get(url)
        for path in [cached_path] if cached_path else self._calls.version_paths:
            async with asyncio.timeout(ANSWER_S), self._http.get(url + path) as response:
                body = await read_page(response, ANSWER_BYTES)
            if response.status == 200 and (text := self._calls.read_version(body)) is not None:
                self._version_path[url] = path
                return WeightLabel.parse(text)
            if response.status >= 500:
                raise aiohttp.ClientError(f"{url}{path} answered {response.status}")
        self._version_path.pop(url, None)
        return None

    async def busyness(self, url: str) -> Load | None:
        """The replica's load; None if it reports none. Raises UNREACHABLE."""
        async with asyncio.timeout(ANSWER_S), self._http.get(url + METRICS_PATH) as response:
            page = await read_page(response, ANSWER_BYTES)
        return read_load(page.decode(errors="replace")) if response.status == 200 else None

    async def load(self, url: str, *, weights: str, version: int, run: str, timeout_s: float) -> None:
        """Load weights from a directory that the server can read, and name them.

        If that fails, InfrastructureFailure has the server's error text. The replica then labels
        its weights `failed` and generates on.
        """
        if self._lora:
            return await self._load_adapter(url, weights, label_of(version, run), timeout_s)
        calls = self._calls
        try:
            async with asyncio.timeout(timeout_s):
                await self._perform(url, calls.pause(label_of(version, run, state=LOADING)))
                await self._perform(url, calls.load(weights, label_of(version, run)))
                await self._perform(url, calls.resume(None))
        except asyncio.CancelledError:
            await run_to_completion(asyncio.create_task(self._resume_failed(url, version, run)))
            raise
        except (*UNREACHABLE, InfrastructureFailure) as error:
            await self._resume_failed(url, version, run)
            raise InfrastructureFailure(str(error) or f"no answer within {timeout_s:g} s") from error

    async def _load_adapter(self, url: str, weights: str, name: str, timeout_s: float) -> None:
        """Load one adapter. Requests under way use the one before, and so do processes that have
        not polled the new one yet."""
        try:
            async with asyncio.timeout(timeout_s):
                loaded = await self._adapters(url)
                if name in loaded:  # the last in the list is the one that is used
                    await self._perform(url, self._calls.unload_adapter(name))
                await self._perform(url, self._calls.load_adapter(name, weights))
                for old in [other for other in loaded if other != name][: -ADAPTERS_KEPT + 1]:
                    await self._perform(url, self._calls.unload_adapter(old))
        except (*UNREACHABLE, InfrastructureFailure) as error:
            raise InfrastructureFailure(str(error) or f"no answer within {timeout_s:g} s") from error

    async def _adapters(self, url: str) -> list[str]:
        """Names of the loaded versions, the last loaded last."""
        async with asyncio.timeout(ANSWER_S), self._http.get(url + self._calls.models_path) as response:
            body = await read_page(response, ANSWER_BYTES)
        if response.status != 200:
            raise aiohttp.ClientError(f"{url}{self._calls.models_path} answered {response.status}")
        return [name for name in self._calls.read_adapters(body) if WeightLabel.parse(name).run]

    async def _resume_failed(self, url: str, version: int, run: str) -> None:
        with contextlib.suppress(*UNREACHABLE, InfrastructureFailure):
            async with asyncio.timeout(RESUME_S):
                await self._perform(url, self._calls.resume(label_of(version, run, state=FAILED)))

    async def resume(self, url: str) -> None:
        """Let the server generate on, after an orchestrator was killed between loading and
        resuming."""
        if self._lora:
            return
        async with asyncio.timeout(ANSWER_S):
            await self._perform(url, self._calls.resume(None))

    async def poll_load(self, replica: Replica) -> None:
        """Poll the load, for the choice between replicas, and the start time of the answering process."""
        while True:
            try:
                replica.hear_load(await self.busyness(replica.url))
            except UNREACHABLE:
                replica.hear_load(None)
            await asyncio.sleep(LOAD_S)

    async def poll_version(self, replica: Replica) -> None:
        """Poll the weights' label: once a second, and at once when a request or a sealing waits for it."""
        while True:
            replica.asked.clear()
            began = time.monotonic()
            try:
                replica.hear(await self.label(replica.url), began=began)
            except UNREACHABLE:
                replica.poll_failed()
            await asyncio.sleep(FAILED_PAUSE_S if replica.failed_polls else LEAST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await replica.asked.wait()

    async def _perform(self, url: str, calls: Sequence[Call]) -> None:
        for call in calls:
            attempts = RESET_ATTEMPTS if call.may_be_early else 1
            while (refused := await self._call(url, call)) is not None:
                attempts -= 1
                if not attempts:
                    raise InfrastructureFailure(f"{url}{call.path} answered {refused}")
                await asyncio.sleep(RESET_PAUSE_S)

    async def _call(self, url: str, call: Call) -> str | None:
        """The server's answer if it refused the call, else None."""
        async with self._http.post(url + call.path, json=call.body) as response:
            body = await read_page(response, ANSWER_BYTES)
        text = f"{response.status}: {' '.join(body.decode(errors='replace').split())[:ERROR_CHARACTERS]}"
        if response.status in ABSENT:
            raise InfrastructureFailure(f"{url}{call.path} answered {text}. {self._calls.hint}")
        return text if response.status != 200 or _is_refusal(body) else None


def reload_advice(settings: Engine) -> str:
    """The remedy for an engine that has the weights of an earlier run."""
    calls = load_dialect(settings.dialect).control
    if settings.lora:
        needed, remedy = calls.unload_adapter(""), "unload that run's adapters"
    else:
        needed = [*calls.pause("")[:1], *calls.load("", ""), *calls.resume(None)]
        remedy = 'load the model\'s own weights into it again and name them "default"'
    paths = ", ".join(dict.fromkeys(call.path.partition("?")[0] for call in needed))
    return f'restart the engine, or {remedy} (docs/engines.md, section "{EARLIER_RUN}": {paths})'


async def read_page(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, or its first `limit` bytes. aiohttp's `read` may return less: only the bytes that
    have arrived."""
    parts = list[bytes]()
    while limit and (part := await response.content.read(limit)):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def _is_refusal(body: bytes) -> bool:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(answer, dict) and answer.get("success") is False


@contextlib.asynccontextmanager
async def polling(
    poll: Callable[[Replica], Coroutine[Any, Any, None]], replicas: Sequence[Replica]
) -> AsyncIterator[None]:
    """Poll every replica, each in a task of its own."""
    tasks = [asyncio.create_task(poll(replica)) for replica in replicas]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
