"""`python -m bench ingest`: time and memory from response bodies to arrays, against parsing and decoding everything.

Both read the same bodies in alternating rounds and must return the same arrays. The baseline uses the fastest library
for each step, so the difference is work that Headpond avoids.
"""

import multiprocessing
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from bench.harness.report import Report, Target, median
from bench.harness.response_bodies import Rollout
from headpond.config.engine import Engine
from headpond.engines.dialects import dialect_of
from headpond.engines.responses.response import RequestInfo, read_turn
from headpond.store import open_store
from headpond.turn import OpenSample, RouteFormat, Routes, Turn

CASES = {
    "50 turns": Rollout(turns=50, tokens=60_000, sampled=1 / 6),  # an agent: calls of 200 tokens, tool results of 1,000
    "8 turns": Rollout(turns=8, tokens=43_000, sampled=0.5),  # long reasoning
}
QUICK_CASES = {name: replace(case, tokens=case.tokens // 40, layers=4) for name, case in CASES.items()}
ROUNDS, QUICK_ROUNDS = 7, 1
REPEATS = 3
"""of the short measurements in a round, so that one disturbance moves the median less"""
SPEEDUPS = {"50 turns": 50.0, "8 turns": 12.0}
CHAT = RequestInfo(dialect=dialect_of(Engine()))
MEMORY_CASE = "50 turns"
BYTES_A_TOKEN = 9
"""of the columns: `input_ids` i32, `logprobs` f32, `loss_mask` u8"""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Arrays of one rollout."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    rows: NDArray[Any]

    def same(self, other: "Arrays") -> bool:
        pairs = [(self.ids, other.ids), (self.logprobs, other.logprobs), (self.rows, other.rows)]
        return all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def parse_all(bodies: list[bytes]) -> Arrays:
    """The baseline: parse every body, decode all of its base64, concatenate the new rows at the end."""
    ids, logprobs, rows, sequence = [], [], [], list[int]()
    for body in bodies:
        response = orjson.loads(body)
        choice = response["choices"][0]
        prompt, completion, routed = response["prompt_token_ids"], choice["token_ids"], choice["routed_experts"]
        assert prompt[: len(sequence)] == sequence
        tail = prompt[len(sequence) :]
        decoded = np.frombuffer(pybase64.b64decode(routed["data"]), np.uint8).reshape(routed["shape"])
        rows.append(decoded[max(0, len(sequence) - 1) :])
        ids.append(np.array(tail + completion, np.int32))
        sampled = [token["logprob"] for token in choice["logprobs"]["content"]]
        logprobs.append(np.array([0.0] * len(tail) + sampled, np.float32))
        sequence = prompt + completion
    return Arrays(ids=np.concatenate(ids), logprobs=np.concatenate(logprobs), rows=np.concatenate(rows))


class Recorder:
    """The state of a recorder that reading a response needs."""

    def __init__(self) -> None:
        self._open_samples: list[OpenSample] = []
        self._route_format = RouteFormat()

    def read(self, body: bytes) -> Turn:
        turn = read_turn(body, request=CHAT, open_samples=self._open_samples, route_format=self._route_format)
        self._open_samples = [OpenSample(sequence=turn.sequence, rows_from=turn.tokens - 1)]
        self._route_format = rows_of(turn).format
        return turn


def rows_of(turn: Turn) -> Routes:
    assert turn.routes is not None
    return turn.routes


def joined(bodies: list[bytes]) -> Arrays:
    """Arrays as Headpond reads them. Joined for the comparison only; a recorder never joins them in memory."""
    recorder = Recorder()
    turns = [recorder.read(body) for body in bodies]
    ids = [ids for turn in turns for ids in (turn.prompt_ids, turn.completion_ids)]
    logprobs = [
        part for turn in turns for part in (np.zeros(len(turn.prompt_ids), np.float32), turn.completion_logprobs)
    ]
    rows = np.concatenate([rows_of(turn).rows for turn in turns])
    return Arrays(ids=np.concatenate(ids), logprobs=np.concatenate(logprobs), rows=rows)


def read(bodies: list[bytes], write: Callable[[NDArray[Any]], None] | None = None) -> list[tuple[NDArray[Any], ...]]:
    """Read as a recorder does: keep the columns, write each turn's rows out at once."""
    recorder, columns = Recorder(), list[tuple[NDArray[Any], ...]]()
    for body in bodies:
        turn = recorder.read(body)
        if write:
            write(rows_of(turn).rows)
        columns.append((turn.prompt_ids, turn.completion_ids, turn.completion_logprobs))
        del turn
    return columns


def copy_and_write(rows: NDArray[np.uint8], target: NDArray[np.uint8], path: Path) -> None:
    """Lower bound of handling the rows: one memcpy and one write."""
    np.copyto(target, rows)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        written = os.write(descriptor, target.data)
        assert written == target.nbytes
    finally:
        os.close(descriptor)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    result = work()
    taken = time.perf_counter() - started
    del result
    return taken


def measure(rollout: Rollout, rounds: int, directory: Path) -> dict[str, float]:
    """Median seconds of each method over alternating rounds."""
    bodies = list(rollout.bodies())
    arrays = parse_all(bodies)
    assert arrays.same(joined(bodies))
    store, target = open_store(directory.as_uri()), np.empty_like(arrays.rows)
    taken: dict[str, list[float]] = {"parse all": [], "read": [], "read and write": [], "copy and write": []}
    for _ in range(rounds):
        taken["parse all"].append(seconds(lambda: parse_all(bodies)))
        for _ in range(REPEATS):
            taken["read"].append(seconds(lambda: read(bodies)))
            part = store.part("rollout/experts", reserve_head=True)
            taken["read and write"].append(seconds(lambda part=part: read(bodies, part.append)))
            part.discard()
            path = directory / "plain"
            taken["copy and write"].append(seconds(lambda path=path: copy_and_write(arrays.rows, target, path)))
            path.unlink()
    return {name: median(values) for name, values in taken.items()}


def peak_memory(rollout: Rollout) -> tuple[int, int]:
    """Peak bytes of a rollout (one body, the columns so far, allocations of reading) and the largest body.

    Runs in its own process, with one body in memory at a time.
    """
    recorder, columns, peak, largest = Recorder(), 0, 0, 0
    for body in rollout.bodies():
        tracemalloc.start()
        turn = recorder.read(body)
        _, allocated = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        peak, largest = max(peak, len(body) + columns + allocated), max(largest, len(body))
        columns += BYTES_A_TOKEN * (len(turn.prompt_ids) + len(turn.completion_ids))
        del turn
    return peak, largest


def run(*, quick: bool) -> Report:
    cases, rounds = (QUICK_CASES, QUICK_ROUNDS) if quick else (CASES, ROUNDS)
    figures, targets = dict[str, float](), list[Target]()
    for case, rollout in cases.items():
        with tempfile.TemporaryDirectory() as directory:
            taken = measure(rollout, rounds, Path(directory))
        figures |= {f"{case}, {method} (ms)": value * 1e3 for method, value in taken.items()}
        speedup, overhead = taken["parse all"] / taken["read"], taken["read and write"] / taken["copy and write"]
        targets += [
            Target(name=f"{case}: times faster", value=speedup, limit=SPEEDUPS[case], sense="at least"),
            Target(name=f"{case}: rows written, times copy and write", value=overhead, limit=2.0),
        ]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        for case, rollout in cases.items():
            peak, body = process.submit(peak_memory, rollout).result()
            columns = BYTES_A_TOKEN * rollout.tokens
            figures |= {f"{case}, peak (MB)": peak / 1e6, f"{case}, largest body (MB)": body / 1e6}
            figures[f"{case}, columns (MB)"] = columns / 1e6
            if case == MEMORY_CASE:
                targets.append(Target(name=f"{case}: peak (MB)", value=peak / 1e6, limit=(2 * columns + body) / 1e6))
    return Report(bench="ingest", figures=figures, targets=targets, rounds=rounds, quick=quick)
