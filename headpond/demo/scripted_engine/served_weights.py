"""The engine's weights: which version is loaded, what it is called, and which requests are in flight.

Weights are a directory with `weights.json`, `{"version": 7}`, and a model's file if the engine has a model. Without
one, tokens of filler text depend on the version; a request in flight has sampled half of its remaining tokens whenever
the weights change or the engine pauses, and is answered when the engine resumes: time decides nothing.
"""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

from headpond.demo import tiny_moe
from headpond.errors import BadRequest, ConfigError

FILE = "weights.json"
# vLLM and SGLang give this label to the weights that they started with.
FIRST_LABEL = "default"
KEEP, WAIT, ABORT = "keep", "wait", "abort"


@dataclass(frozen=True)
class State:
    label: str  # The version that the engine reports.
    version: int  # The version that is loaded.


@dataclass(frozen=True)
class TokenSpan:
    """Tokens `[start, end)` of a completion."""

    state: State
    start: int
    end: int


@dataclass(kw_only=True, eq=False)
class Flight:
    """A request that is being sampled."""

    request_id: str | None
    adapter: int | None = None  # version of the LoRA adapter that it names
    # states under which it has sampled tokens
    before: list[State] = field(default_factory=list[State])
    aborted: bool = False
    # set to answer without further latency
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def spans(self, now: State, tokens: int) -> list[TokenSpan]:
        states = [*self.before, now]
        ends = [tokens - (tokens >> number) for number in range(1, len(states))] + [tokens]
        spans: list[TokenSpan] = []
        for state, end in zip(states, ends, strict=True):
            start = spans[-1].end if spans else 0
            if spans and spans[-1].state == state:
                start = spans.pop().start
            spans.append(TokenSpan(state, start, end))
        return [span for span in spans if span.start < span.end] or spans[-1:]


class Weights:
    def __init__(self, model: tiny_moe.Weights | None = None) -> None:
        self.model = model  # None: completions are scripted
        self.state = State(FIRST_LABEL, 0)
        self.adapters: dict[str, int] = {}  # name -> version
        self.flights: set[Flight] = set()
        self.waiting = 0  # requests that came while the engine was paused
        self._accepting = asyncio.Event()
        self._accepting.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._frozen = False  # whether requests in flight are held too
        self._changed = asyncio.Event()  # set by what may end or continue a held request

    @property
    def paused(self) -> bool:
        return not self._accepting.is_set()

    async def begin(self, request_id: str | None, model: str | None) -> Flight:
        """Waits while the engine is paused."""
        self.waiting += 1
        try:
            await self._accepting.wait()
        finally:
            self.waiting -= 1
        flight = Flight(request_id=request_id, adapter=self.adapters.get((model or "").rpartition(":")[2]))
        self.flights.add(flight)
        self._idle.clear()
        return flight

    def end(self, flight: Flight) -> None:
        self.flights.discard(flight)
        if not self.flights:
            self._idle.set()

    async def sample(self, flight: Flight, latency_s: float) -> None:
        """Wait until the completion has ended, or was aborted."""
        try:
            async with asyncio.timeout(latency_s):
                await flight.released.wait()
        except TimeoutError:
            pass
        if self._frozen:
            await flight.released.wait()

    async def until_running(self) -> bool:
        """Waits while requests in flight are held, until the engine resumes or some are aborted: False."""
        if not self._frozen:
            return True
        self._changed.clear()
        await self._changed.wait()
        return not self._frozen

    def rename(self, label: str) -> None:
        self._change(State(label, self.state.version))

    def load(self, directory: str, label: str | None = None) -> None:
        """BadRequest if there are no weights."""
        version = version_in(directory)
        if self.model is not None:
            try:
                self.model = tiny_moe.load(Path(directory))  # 0.3 MB
            except ConfigError as error:
                raise BadRequest(str(error)) from None
        self._change(State(self.state.label if label is None else label, version))

    def load_adapter(self, name: str, directory: str) -> None:
        if self.model is not None:
            raise BadRequest("the model of this engine has no LoRA adapters: load whole weights")
        self.adapters[name] = version_in(directory)

    def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise BadRequest(f"The lora adapter '{name}' cannot be found.")

    async def pause(self, mode: str) -> None:
        self._accepting.clear()
        if mode == KEEP and not self._frozen:
            self._frozen = True
            self._note_state()
        elif mode == ABORT:
            self.abort(None)
        elif mode == WAIT:
            await self._idle.wait()

    def resume(self) -> None:
        if self._frozen:
            for flight in self.flights:
                flight.released.set()
        self._frozen = False
        self._changed.set()
        self._accepting.set()

    def abort(self, request_ids: list[str] | None) -> int:
        """All requests, if None."""
        flights = [flight for flight in self.flights if not flight.aborted]
        ended = [flight for flight in flights if request_ids is None or flight.request_id in request_ids]
        for flight in ended:
            flight.aborted = True
            flight.released.set()
        self._changed.set()
        return len(ended)

    def _change(self, state: State) -> None:
        if not self._frozen:
            self._note_state()
        self.state = state

    def _note_state(self) -> None:
        for flight in self.flights:
            flight.before.append(self.state)


def version_in(directory: str) -> int:
    path = Path(directory) / FILE
    try:
        return int(json.loads(path.read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"cannot load weights from {directory}: {type(error).__name__}: {error}") from None
