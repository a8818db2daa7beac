"""`python -m bench sessions`: chats per second through the session server, latency of /health, memory of a session.

Engine, server, agents and poller are separate processes. Baselines in the same rounds: the same load on the engine
itself and on a forwarder that only cuts, writes and forwards (the floor of a recorder), and polling a server that does
nothing else (the canary).
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.procfs import cpu_s, read_bytes, resident_bytes
from bench.harness.progress import Show, progress
from bench.harness.report import Report, Target, median
from bench.harness.session_load import SessionLoad
from headpond.event_loop.offload import cores
from headpond.processes.child_process import ChildProcess, listening_port

FORMS = {"base64": "object", "npy": "npy"}
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
"""SHARE is of two processes, or of one whose sessions have parallel chats: engine and client alone use two cores"""
PARALLEL = 4
"""chats of one session at once, each on a branch"""
PACE = 507
"""chats/s of the engine alone on the machine of which SHARE was set, as a limit: 64 agents, each of which waits"""
BASE = "base64, 1.3 MB"
DIRECT, BARE = f"{BASE}, without a session", f"{BASE}, a bare cut, write and forward"
TWO, PACED = f"{BASE}, two servers", f"{BASE}, an engine of {PACE} chats/s"
AGAINST_ENGINE, AGAINST_BARE = "chats/s against the engine without a session", "chats/s against the bare forwarder"


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
class Server:
    process: ChildProcess
    port: int


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An engine and the session server in front of it."""

    server: Server
    engine: Server

    def resident_bytes(self) -> int:
        return resident_bytes(self.server.process.pid)


@dataclass(frozen=True, kw_only=True)
class Bench:
    pairs: dict[str, Pair]
    small: Pair
    second: Server
    """another session server in front of the engine of base64"""
    forwarder: Server
    """in front of the same engine"""
    paced: Pair
    bare_port: int
    load: SessionLoad
    poller: SessionLoad
    lengths: Lengths

    def flood(self, form: str, size: str, **agent: Any) -> dict[str, float]:
        pair = self.pairs[form]
        return self.measure(size, pair.engine, [pair.server], **agent)

    def measure(self, size: str, engine: Server, servers: list[Server], **agent: Any) -> dict[str, float]:
        """A closed loop. Without servers, or with the forwarder, requests are the engine's own (`direct`)."""
        characters, connections = SIZES[size]
        agent |= {"characters": characters // self.lengths.shrink, "turns": TURNS}
        ports = [server.port for server in servers or [engine]]
        pids = {"engine's CPU ms": [engine.process.pid], "client's CPU ms": [self.load.pid]}
        if servers:
            pids["CPU ms"] = [server.process.pid for server in servers]
        receivers = pids.get("CPU ms", [self.load.pid])
        before = {name: sum(map(cpu_s, of)) for name, of in pids.items()}
        received = sum(map(read_bytes, receivers))
        result = self.load.do(
            "closed_loop",
            host="127.0.0.1",
            ports=ports,
            connections=connections,
            seconds=self.lengths.seconds,
            **agent,
        )
        chats = result["chats"]
        figures = {"chats/s": chats / result["seconds"], "p95 ms": result["p95"] * 1000}
        figures["MB received"] = (sum(map(read_bytes, receivers)) - received) / chats / 1e6
        return figures | {name: (sum(map(cpu_s, of)) - before[name]) * 1000 / chats for name, of in pids.items()}

    def shares(self) -> dict[str, dict[str, float]]:
        """The engine alone, the forwarder, the session server as one and as two processes, and one with parallel chats:
        by name, what each reaches."""
        pair = self.pairs["base64"]
        engine, server = pair.engine, pair.server
        measured = {
            DIRECT: self.measure("1.3 MB", engine, [], direct=True),
            BARE: self.measure("1.3 MB", engine, [self.forwarder], direct=True),
            BASE: self.measure("1.3 MB", engine, [server]),
            TWO: self.measure("1.3 MB", engine, [server, self.second]),
            f"{BASE}, parallel": self.measure("1.3 MB", engine, [server], parallel=PARALLEL),
        }
        alone, bare = measured[DIRECT]["chats/s"], measured[BARE]["chats/s"]
        measured[BARE][AGAINST_ENGINE] = bare / alone
        for figures in (measured[name] for name in measured if name not in (DIRECT, BARE)):
            figures |= {AGAINST_ENGINE: figures["chats/s"] / alone, AGAINST_BARE: figures["chats/s"] / bare}
        direct = self.measure("1.3 MB", self.paced.engine, [], direct=True)["chats/s"]
        measured[f"{PACED}, without a session"] = {"chats/s": direct}
        measured[PACED] = self.measure("1.3 MB", self.paced.engine, [self.paced.server])
        measured[PACED][AGAINST_ENGINE] = measured[PACED]["chats/s"] / direct
        return measured

    def health(self) -> list[dict[str, float]]:
        """Seconds of /health under a steady load, and of the canary."""
        pair, seconds = self.pairs["base64"], self.lengths.seconds
        characters, connections = SIZES["1.3 MB"]
        server: dict[str, Any] = {"host": "127.0.0.1", "port": pair.server.port, "connections": connections}
        targets = [("127.0.0.1", pair.server.port, "/health"), ("127.0.0.1", self.bare_port, "/health")]
        self.load.send("steady", **server, rate=RATE, seconds=seconds, characters=characters, turns=TURNS)
        self.poller.send("poll", targets=targets, seconds=seconds, interval_s=POLL_S)
        polled = self.poller.receive()["polled"]
        self.load.receive()
        return polled

    def idle_bytes(self) -> float:
        """Memory per idle session. Sessions created before allocate what all of them share."""
        server: dict[str, Any] = {"host": "127.0.0.1", "port": self.small.server.port, "connections": 16}
        agent: dict[str, Any] = {"characters": 2_400, "turns": 2}
        self.load.do("fill", **server, sessions=self.lengths.sessions // 4, **agent)
        before = self.small.resident_bytes()
        self.load.do("fill", **server, sessions=self.lengths.sessions, **agent)
        return (self.small.resident_bytes() - before) / self.lengths.sessions

    def growth_bytes(self) -> int:
        """Growth of memory over all cycles but the first fifth."""
        server: dict[str, Any] = {"host": "127.0.0.1", "port": self.small.server.port, "connections": 16}
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
        Target(name="chats/s", value=figures[f"{BASE}: chats/s"], limit=ENOUGH_CHATS, sense="at least"),
        *(
            Target(
                name=f"chats/s through {api}, of chat's",
                value=figures[f"{BASE}, {api}: chats/s"] / figures[f"{BASE}: chats/s"],
                limit=API_SHARE,
                sense="at least",
            )
            for api in APIS
        ),
        Target(
            name="chats/s / without a session, two processes",
            value=figures[f"{TWO}: {AGAINST_ENGINE}"],
            limit=SHARE,
            sense="at least",
        ),
        Target(name="CPU of a chat (ms)", value=figures[f"{BASE}: CPU ms"], limit=CPU_MS),
        Target(name="CPU of a chat, two processes (ms)", value=figures[f"{TWO}: CPU ms"], limit=CPU_MS),
        Target(
            name="parallel chats/s / without a session",
            value=figures[f"{BASE}, parallel: {AGAINST_ENGINE}"],
            limit=SHARE,
            sense="at least",
        ),
        Target(name="CPU of a parallel chat (ms)", value=figures[f"{BASE}, parallel: CPU ms"], limit=CPU_MS),
        Target(name="/health p95 above the canary's (ms)", value=late_ms, limit=HEALTH_MS),
        Target(name="idle session / its columns", value=ratio, limit=MEMORY_RATIO),
        Target(name=f"growth over {lengths.cycles} sessions (MB)", value=growth / 1e6, limit=GROWTH_MB),
    ]
    return Report(bench="sessions", figures=figures, targets=targets, rounds=lengths.rounds, quick=quick)


def measured(bench: Bench, show: Show) -> dict[str, float]:
    """Medians over alternating rounds."""
    rounds: dict[str, list[float]] = {}
    for number in range(bench.lengths.rounds):
        show(f"round {number + 1} of {bench.lengths.rounds}")
        floods = bench.shares()
        floods |= {f"{BASE}, {api}": bench.flood("base64", "1.3 MB", api=api) for api in APIS}
        kinds = [(form, size) for size in SIZES for form in bench.lengths.forms if f"{form}, {size}" != BASE]
        floods |= {f"{form}, {size}": bench.flood(form, size) for form, size in kinds}
        for name, figures in floods.items():
            for figure, value in figures.items():
                rounds.setdefault(f"{name}: {figure}", []).append(value)
        for server, polled in zip(("/health", "canary"), bench.health(), strict=True):
            for share, value in polled.items():
                rounds.setdefault(f"{server} {share} (ms)", []).append(value * 1000)
    figures = {name: median(values) for name, values in rounds.items()}
    return figures | bounds(figures)


def bounds(figures: dict[str, float]) -> dict[str, float]:
    """What SHARE allows, and what the CPU of a chat allows on these cores, all of them used to the full."""
    wanted = SHARE * figures[f"{DIRECT}: chats/s"] / 1000
    others = figures[f"{BASE}: engine's CPU ms"] + figures[f"{BASE}: client's CPU ms"]
    most = 1000 * cores() / (figures[f"{BASE}: CPU ms"] + others)
    return {
        f"CPU ms of a chat for {SHARE}, if the server uses one core": 1 / wanted,
        f"CPU ms of a chat for {SHARE}, on all {cores()} cores": cores() / wanted - others,
        "most chats/s on all cores, at this CPU of a chat": most,
        "the same against the engine without a session": most / figures[f"{DIRECT}: chats/s"],
    }


@contextlib.contextmanager
def ready(lengths: Lengths) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        layers = {name: ["--layers", "48", "--form", FORMS[name]] for name in lengths.forms}
        pairs = {name: stack.enter_context(_pair(directory, name, shape)) for name, shape in layers.items()}
        engine, pace = pairs["base64"].engine, ["--latency", f"constant:{SIZES['1.3 MB'][1] / PACE:.4f}"]
        forward = ["python", "-m", "bench.harness.bare_forwarder", str(engine.port), str(directory)]
        yield Bench(
            pairs=pairs,
            small=stack.enter_context(_pair(directory, "small", ["--layers", "2", "--topk", "2"])),
            second=stack.enter_context(_sessions(directory, "second", engine)),
            forwarder=stack.enter_context(_running(directory, "forwarder", forward)),
            paced=stack.enter_context(_pair(directory, "paced", [*layers["base64"], *pace])),
            bare_port=stack.enter_context(
                _running(directory, "bare", ["python", "-m", "bench.harness.bare_server", "79"])
            ).port,
            load=stack.enter_context(SessionLoad()),
            poller=stack.enter_context(SessionLoad()),
            lengths=lengths,
        )


@contextlib.contextmanager
def _pair(directory: Path, name: str, shape: list[str]) -> Iterator[Pair]:
    command = ["headpond", "engine", "--port", "0", "--length", "constant:120", *shape]
    with (
        _running(directory, f"{name}-engine", command) as engine,
        _sessions(directory, name, engine) as server,
    ):
        yield Pair(server=server, engine=engine)


@contextlib.contextmanager
def _sessions(directory: Path, name: str, engine: Server) -> Iterator[Server]:
    url, store = f"http://127.0.0.1:{engine.port}", (directory / f"{name}-store").as_uri()
    command = ["headpond", "sessions", "--port", "0", "--engine-urls", url, "--store", store]
    with _running(directory, f"{name}-sessions", command) as server:
        yield server


@contextlib.contextmanager
def _running(directory: Path, name: str, command: list[str]) -> Iterator[Server]:
    variables = {"HEADPOND_POLICY__MAX_SEQ_LEN": "131072", "HEADPOND_SESSIONS__CONCURRENCY": str(PARALLEL)}
    process = ChildProcess(name, command, directory=directory, variables=variables)
    try:
        yield Server(process=process, port=listening_port(process))
    finally:
        process.kill()
