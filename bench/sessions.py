"""Agents talk to an engine through the session server: chats a second, /health meanwhile, what a session costs.

Engine, server, agents and who polls are processes of their own. Beside it, in the same rounds: the same load on the
engine itself, and polling a server that does nothing else (the canary).
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.cpu import cpu_s
from bench.processes import Process
from bench.progress import Say, progress
from bench.report import Report, Target, median

READY = re.compile(r"url=http://127\.0\.0\.1:(\d+)")
FORMS = {"base64": "object", "npy": "npy", "lists": "lists"}
SIZES = {"1.3 MB": (2_000, 64), "25 MB": (46_000, 8)}
"""Characters of a session's first request, one row of 48 x 8 experts each, and agents at once."""
TURNS = 8
"""of a session: in the mean, its answers have the named size"""
RATE = 100.0
"""chats a second, while /health is polled"""
POLL_S = 0.01
BYTES_A_TOKEN = 9
"""Of the columns: `input_ids` i32, `logprobs` f32, `loss_mask` u8."""
IDLE_TOKENS = 2_400 + 23 + 120
"""of a session that is left alone: question, roles, answer"""
ENOUGH_CHATS, HEALTH_MS, MEMORY_RATIO, GROWTH_MB = 250.0, 10.0, 1.2, 10.0


@dataclass(frozen=True, kw_only=True)
class Lengths:
    rounds: int
    seconds: float
    sessions: int
    """that are left alone"""
    cycles: int
    forms: tuple[str, ...] = tuple(FORMS)
    shrunk: int = 1
    """how much smaller bodies are than they are called"""


FULL = Lengths(rounds=5, seconds=3.0, sessions=1_000, cycles=10_000)
QUICK = Lengths(rounds=1, seconds=0.2, sessions=20, cycles=40, forms=("base64",), shrunk=20)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An engine and a session server before it."""

    server: Process
    port: int
    engine_port: int

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024


class Load:
    """A process of agents: tasks are given, then their figures taken."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.session_load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def give(self, task: str, **how: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"task": task, **how}) + "\n")
        self._process.stdin.flush()

    def take(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def do(self, task: str, **how: Any) -> dict[str, Any]:
        self.give(task, **how)
        return self.take()


@dataclass(frozen=True, kw_only=True)
class Bench:
    pairs: dict[str, Pair]
    small: Pair
    bare_port: int
    load: Load
    poller: Load
    lengths: Lengths

    def flood(self, form: str, size: str, *, direct: bool = False) -> dict[str, float]:
        pair, (characters, connections) = self.pairs[form], SIZES[size]
        before = cpu_s(pair.server.pid)
        port = pair.engine_port if direct else pair.port
        how: dict[str, Any] = {"characters": characters // self.lengths.shrunk, "turns": TURNS, "direct": direct}
        where: dict[str, Any] = {"host": "127.0.0.1", "port": port, "connections": connections}
        found = self.load.do("closed_loop", **where, seconds=self.lengths.seconds, **how)
        cpu_ms = (cpu_s(pair.server.pid) - before) * 1000 / found["chats"]
        return {"chats/s": found["chats"] / found["seconds"], "CPU ms": cpu_ms, "p95 ms": found["p95"] * 1000}

    def health(self) -> list[dict[str, float]]:
        """Seconds of /health beside a steady load, and of the canary."""
        pair, seconds = self.pairs["base64"], self.lengths.seconds
        characters, connections = SIZES["1.3 MB"]
        where: dict[str, Any] = {"host": "127.0.0.1", "port": pair.port, "connections": connections}
        targets = [("127.0.0.1", pair.port, "/health"), ("127.0.0.1", self.bare_port, "/health")]
        self.load.give("steady", **where, rate=RATE, seconds=seconds, characters=characters, turns=TURNS)
        self.poller.give("poll", targets=targets, seconds=seconds, interval_s=POLL_S)
        polled = self.poller.take()["polled"]
        self.load.take()
        return polled

    def idle_bytes(self) -> float:
        """Of memory, a session that is left alone; the first ones pay for what all share."""
        where: dict[str, Any] = {"host": "127.0.0.1", "port": self.small.port, "connections": 16}
        how: dict[str, Any] = {"characters": 2_400, "turns": 2}
        self.load.do("fill", **where, sessions=self.lengths.sessions // 4, **how)
        before = self.small.resident_bytes()
        self.load.do("fill", **where, sessions=self.lengths.sessions, **how)
        return (self.small.resident_bytes() - before) / self.lengths.sessions

    def growth_bytes(self) -> int:
        """Of memory, over all cycles but the first fifth."""
        where: dict[str, Any] = {"host": "127.0.0.1", "port": self.small.port, "connections": 16}
        how: dict[str, Any] = {"characters": 100, "turns": 1, "seals": True}
        self.load.do("cycle", **where, cycles=self.lengths.cycles // 5, **how)
        before = self.small.resident_bytes()
        self.load.do("cycle", **where, cycles=self.lengths.cycles * 4 // 5, **how)
        return self.small.resident_bytes() - before


def run(*, quick: bool) -> Report:
    lengths = QUICK if quick else FULL
    with contextlib.ExitStack() as stack, progress("sessions") as say:
        bench = stack.enter_context(ready(lengths))
        figures = measured(bench, say)
        say("memory of idle sessions")
        idle = bench.idle_bytes()
        say(f"memory over {lengths.cycles} sessions")
        growth = bench.growth_bytes()
    ratio = idle / (IDLE_TOKENS * BYTES_A_TOKEN)
    figures |= {"idle session (bytes)": idle, "its columns (bytes)": IDLE_TOKENS * BYTES_A_TOKEN}
    late_ms = figures["/health p95 (ms)"] - figures["canary p95 (ms)"]
    targets = [
        Target(name="chats/s", value=figures["base64, 1.3 MB: chats/s"], limit=ENOUGH_CHATS, sense="at least"),
        Target(name="/health p95 above the canary's (ms)", value=late_ms, limit=HEALTH_MS),
        Target(name="idle session / its columns", value=ratio, limit=MEMORY_RATIO),
        Target(name=f"growth over {lengths.cycles} sessions (MB)", value=growth / 1e6, limit=GROWTH_MB),
    ]
    return Report(bench="sessions", figures=figures, targets=targets, rounds=lengths.rounds, quick=quick)


def measured(bench: Bench, say: Say) -> dict[str, float]:
    """Medians over rounds in which everything takes its turn."""
    found: dict[str, list[float]] = {}
    for number in range(bench.lengths.rounds):
        say(f"round {number + 1} of {bench.lengths.rounds}")
        direct = bench.flood("base64", "1.3 MB", direct=True)
        found.setdefault("base64, 1.3 MB, without a session: chats/s", []).append(direct["chats/s"])
        for size in SIZES:
            for form in bench.lengths.forms:
                for name, value in bench.flood(form, size).items():
                    found.setdefault(f"{form}, {size}: {name}", []).append(value)
        for whose, polled in zip(("/health", "canary"), bench.health(), strict=True):
            for share, value in polled.items():
                found.setdefault(f"{whose} {share} (ms)", []).append(value * 1000)
    return {name: median(values) for name, values in found.items()}


@contextlib.contextmanager
def ready(lengths: Lengths) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        layers = {name: ["--layers", "48", "--form", FORMS[name]] for name in lengths.forms}
        pairs = {name: stack.enter_context(_pair(directory, name, shape)) for name, shape in layers.items()}
        small = stack.enter_context(_pair(directory, "small", ["--layers", "2", "--topk", "2"]))
        bare = stack.enter_context(_running(directory, "bare", ["python", "-m", "bench.bare_server", "79"]))
        load, poller = stack.enter_context(Load()), stack.enter_context(Load())
        yield Bench(pairs=pairs, small=small, bare_port=_port(bare), load=load, poller=poller, lengths=lengths)


@contextlib.contextmanager
def _pair(directory: Path, name: str, shape: list[str]) -> Iterator[Pair]:
    engine = ["penstock", "engine", "--port", "0", "--length", "constant:120", *shape]
    with _running(directory, f"{name}-engine", engine) as upstream:
        url, store = f"http://127.0.0.1:{_port(upstream)}", (directory / f"{name}-store").as_uri()
        command = ["penstock", "sessions", "--port", "0", "--engine-urls", url, "--store", store]
        with _running(directory, f"{name}-sessions", command) as server:
            yield Pair(server=server, port=_port(server), engine_port=_port(upstream))


@contextlib.contextmanager
def _running(directory: Path, name: str, command: list[str]) -> Iterator[Process]:
    process = Process(name, command, directory=directory, variables={"PENSTOCK_POLICY__MAX_SEQ_LEN": "131072"})
    try:
        yield process
    finally:
        process.kill()


def _port(process: Process) -> int:
    found = process.wait_until(lambda: READY.search(process.output), what="it listens", timeout_s=60)
    assert found is not None
    return int(found[1])
