"""`penstock bench sessions`: chats per second through the session server, latency of /health, memory of a session.

Engine, server, agents and poller are separate processes. Baselines in the same rounds: the same load on the engine
itself, and polling a server that does nothing else (the canary).
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.processes import listening_port
from bench.harness.procfs import cpu_s, resident_bytes
from bench.harness.progress import Show, progress
from bench.harness.report import Report, Target, median
from bench.harness.session_load import SessionLoad
from penstock.runtime.child_process import ChildProcess

FORMS = {"base64": "object", "npy": "npy", "lists": "lists"}
SIZES = {"1.3 MB": (2_000, 64), "25 MB": (46_000, 8)}
"""characters of a session's first request (one row of 48 x 8 experts each), and concurrent agents"""
TURNS = 8
"""of a session; the mean response has the named size"""
RATE = 100.0
"""chats per second while /health is polled"""
POLL_S = 0.01
BYTES_A_TOKEN = 9
"""of the columns: `input_ids` i32, `logprobs` f32, `loss_mask` u8"""
IDLE_TOKENS = 2_400 + 23 + 120
"""of an idle session: user message, roles, completion"""
APIS = ("messages", "responses")
API_SHARE = 0.8
"""of the chats per second that Chat Completions has"""
ENOUGH_CHATS, HEALTH_MS, MEMORY_RATIO, GROWTH_MB = 250.0, 10.0, 1.2, 10.0
SHARE, CPU_MS = 0.85, 2.0
AGAINST_ENGINE = "base64, 1.3 MB: chats/s against the engine without a session"
PARALLEL = 4
"""chats of one session at once, each on a branch"""
PARALLEL_AGAINST_ENGINE = "base64, 1.3 MB, parallel: chats/s against the engine without a session"


@dataclass(frozen=True, kw_only=True)
class Lengths:
    rounds: int
    seconds: float
    sessions: int
    """idle sessions"""
    cycles: int
    forms: tuple[str, ...] = tuple(FORMS)
    shrink: int = 1
    """divisor of the named body sizes"""


FULL = Lengths(rounds=5, seconds=3.0, sessions=1_000, cycles=10_000)
QUICK = Lengths(rounds=1, seconds=0.2, sessions=20, cycles=40, forms=("base64",), shrink=20)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An engine and the session server in front of it."""

    server: ChildProcess
    port: int
    engine_port: int

    def resident_bytes(self) -> int:
        return resident_bytes(self.server.pid)


@dataclass(frozen=True, kw_only=True)
class Bench:
    pairs: dict[str, Pair]
    small: Pair
    bare_port: int
    load: SessionLoad
    poller: SessionLoad
    lengths: Lengths

    def flood(
        self, form: str, size: str, *, direct: bool = False, api: str = "chat", parallel: int = 1
    ) -> dict[str, float]:
        pair, (characters, connections) = self.pairs[form], SIZES[size]
        before = cpu_s(pair.server.pid)
        port = pair.engine_port if direct else pair.port
        agent: dict[str, Any] = {"characters": characters // self.lengths.shrink, "turns": TURNS}
        agent |= {"direct": direct, "api": api, "parallel": parallel}
        server: dict[str, Any] = {"host": "127.0.0.1", "port": port, "connections": connections}
        result = self.load.do("closed_loop", **server, seconds=self.lengths.seconds, **agent)
        cpu_ms = (cpu_s(pair.server.pid) - before) * 1000 / result["chats"]
        return {"chats/s": result["chats"] / result["seconds"], "CPU ms": cpu_ms, "p95 ms": result["p95"] * 1000}

    def health(self) -> list[dict[str, float]]:
        """Seconds of /health under a steady load, and of the canary."""
        pair, seconds = self.pairs["base64"], self.lengths.seconds
        characters, connections = SIZES["1.3 MB"]
        server: dict[str, Any] = {"host": "127.0.0.1", "port": pair.port, "connections": connections}
        targets = [("127.0.0.1", pair.port, "/health"), ("127.0.0.1", self.bare_port, "/health")]
        self.load.send("steady", **server, rate=RATE, seconds=seconds, characters=characters, turns=TURNS)
        self.poller.send("poll", targets=targets, seconds=seconds, interval_s=POLL_S)
        polled = self.poller.receive()["polled"]
        self.load.receive()
        return polled

    def idle_bytes(self) -> float:
        """Memory per idle session. Sessions created before allocate what all of them share."""
        server: dict[str, Any] = {"host": "127.0.0.1", "port": self.small.port, "connections": 16}
        agent: dict[str, Any] = {"characters": 2_400, "turns": 2}
        self.load.do("fill", **server, sessions=self.lengths.sessions // 4, **agent)
        before = self.small.resident_bytes()
        self.load.do("fill", **server, sessions=self.lengths.sessions, **agent)
        return (self.small.resident_bytes() - before) / self.lengths.sessions

    def growth_bytes(self) -> int:
        """Growth of memory over all cycles but the first fifth."""
        server: dict[str, Any] = {"host": "127.0.0.1", "port": self.small.port, "connections": 16}
        agent: dict[str, Any] = {"characters": 100, "turns": 1, "seals": True}
        self.load.do("cycle", **server, cycles=self.lengths.cycles // 5, **agent)
        before = self.small.resident_bytes()
        self.load.do("cycle", **server, cycles=self.lengths.cycles * 4 // 5, **agent)
        return self.small.resident_bytes() - before


def run(*, quick: bool) -> Report:
    lengths = QUICK if quick else FULL
    with contextlib.ExitStack() as stack, progress("sessions") as show:
        bench = stack.enter_context(ready(lengths))
        figures = measured(bench, show)
        show("memory of idle sessions")
        idle = bench.idle_bytes()
        show(f"memory over {lengths.cycles} sessions")
        growth = bench.growth_bytes()
    ratio = idle / (IDLE_TOKENS * BYTES_A_TOKEN)
    figures |= {"idle session (bytes)": idle, "its columns (bytes)": IDLE_TOKENS * BYTES_A_TOKEN}
    late_ms = figures["/health p95 (ms)"] - figures["canary p95 (ms)"]
    targets = [
        Target(name="chats/s", value=figures["base64, 1.3 MB: chats/s"], limit=ENOUGH_CHATS, sense="at least"),
        *(
            Target(
                name=f"chats/s through {api}, of chat's",
                value=figures[f"base64, 1.3 MB, {api}: chats/s"] / figures["base64, 1.3 MB: chats/s"],
                limit=API_SHARE,
                sense="at least",
            )
            for api in APIS
        ),
        Target(name="chats/s / without a session", value=figures[AGAINST_ENGINE], limit=SHARE, sense="at least"),
        Target(name="CPU of a chat (ms)", value=figures["base64, 1.3 MB: CPU ms"], limit=CPU_MS),
        Target(
            name="parallel chats/s / without a session",
            value=figures[PARALLEL_AGAINST_ENGINE],
            limit=SHARE,
            sense="at least",
        ),
        Target(name="CPU of a parallel chat (ms)", value=figures["base64, 1.3 MB, parallel: CPU ms"], limit=CPU_MS),
        Target(name="/health p95 above the canary's (ms)", value=late_ms, limit=HEALTH_MS),
        Target(name="idle session / its columns", value=ratio, limit=MEMORY_RATIO),
        Target(name=f"growth over {lengths.cycles} sessions (MB)", value=growth / 1e6, limit=GROWTH_MB),
    ]
    return Report(bench="sessions", figures=figures, targets=targets, rounds=lengths.rounds, quick=quick)


def measured(bench: Bench, show: Show) -> dict[str, float]:
    """Medians over alternating rounds."""
    figures: dict[str, list[float]] = {}
    for number in range(bench.lengths.rounds):
        show(f"round {number + 1} of {bench.lengths.rounds}")
        direct = bench.flood("base64", "1.3 MB", direct=True)
        figures.setdefault("base64, 1.3 MB, without a session: chats/s", []).append(direct["chats/s"])
        for api in APIS:
            for name, value in bench.flood("base64", "1.3 MB", api=api).items():
                figures.setdefault(f"base64, 1.3 MB, {api}: {name}", []).append(value)
        for size in SIZES:
            for form in bench.lengths.forms:
                for name, value in bench.flood(form, size).items():
                    figures.setdefault(f"{form}, {size}: {name}", []).append(value)
        for name, value in bench.flood("base64", "1.3 MB", parallel=PARALLEL).items():
            figures.setdefault(f"base64, 1.3 MB, parallel: {name}", []).append(value)
        for name, of in ((AGAINST_ENGINE, ""), (PARALLEL_AGAINST_ENGINE, ", parallel")):
            share = figures[f"base64, 1.3 MB{of}: chats/s"][-1] / direct["chats/s"]
            figures.setdefault(name, []).append(share)
        for server, polled in zip(("/health", "canary"), bench.health(), strict=True):
            for share, value in polled.items():
                figures.setdefault(f"{server} {share} (ms)", []).append(value * 1000)
    return {name: median(values) for name, values in figures.items()}


@contextlib.contextmanager
def ready(lengths: Lengths) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        layers = {name: ["--layers", "48", "--form", FORMS[name]] for name in lengths.forms}
        pairs = {name: stack.enter_context(_pair(directory, name, shape)) for name, shape in layers.items()}
        small = stack.enter_context(_pair(directory, "small", ["--layers", "2", "--topk", "2"]))
        bare = stack.enter_context(_running(directory, "bare", ["python", "-m", "bench.harness.bare_server", "79"]))
        load, poller = stack.enter_context(SessionLoad()), stack.enter_context(SessionLoad())
        yield Bench(pairs=pairs, small=small, bare_port=listening_port(bare), load=load, poller=poller, lengths=lengths)


@contextlib.contextmanager
def _pair(directory: Path, name: str, shape: list[str]) -> Iterator[Pair]:
    engine = ["penstock", "engine", "--port", "0", "--length", "constant:120", *shape]
    with _running(directory, f"{name}-engine", engine) as upstream:
        url, store = f"http://127.0.0.1:{listening_port(upstream)}", (directory / f"{name}-store").as_uri()
        command = ["penstock", "sessions", "--port", "0", "--engine-urls", url, "--store", store]
        with _running(directory, f"{name}-sessions", command) as server:
            yield Pair(server=server, port=listening_port(server), engine_port=listening_port(upstream))


@contextlib.contextmanager
def _running(directory: Path, name: str, command: list[str]) -> Iterator[ChildProcess]:
    variables = {"PENSTOCK_POLICY__MAX_SEQ_LEN": "131072", "PENSTOCK_SESSIONS__CONCURRENCY": str(PARALLEL)}
    process = ChildProcess(name, command, directory=directory, variables=variables)
    try:
        yield process
    finally:
        process.kill()
