"""A run directory with everything that the dashboard reads, written without running anything."""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headpond.batches import Manifest
from headpond.ids import GroupId
from headpond.ledger.archive import archive
from headpond.ledger.schema import STATEMENTS, open_for_writing
from headpond.ledger.state_rows import RunState
from headpond.store.columns import write_columns
from headpond.store.files import FileStore
from headpond.version import release
from support.rollouts import MadeRollout, MadeTurn, RolloutMaker, plan_of, seal

RUN = "0123456789ab"
GROUP_SIZE = 3
DROPPED, LOST, OPEN = 1000, 1001, 1002
"""ordinals of a filtered group, of one whose rollouts died, and of one that is being played"""


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    path: Path
    rollouts: dict[str, MadeRollout]
    manifests: list[Manifest]


def make_run(
    path: Path, *, steps: int = 2, archived: bool = True, conversations: Sequence[Any] = (), settings: Any = None
) -> MadeRun:
    """Each step has one group; step 0 is trained. `conversations`: the messages of the rollouts of the first group."""
    path.mkdir(parents=True)
    (path / "store").mkdir()
    store = FileStore((path / "store").as_uri())
    maker = RolloutMaker(store=store, experts="uint8")
    made, manifests, rows = dict[str, MadeRollout](), list[Manifest](), list[tuple[Any, ...]]()
    for step in range(steps):
        group = str(GroupId(step + 1))
        members = [_made(maker, group, index, conversations if step == 0 else ()) for index in range(GROUP_SIZE)]
        made |= {member.planned.rollout: member for member in members}
        manifests.append(seal(store, plan_of(members, step=step, data_ranks=2)))
        rows += [_row(member, index, step) for index, member in enumerate(members)]
    rows += [(str(GroupId(DROPPED)), n, "filtered", "zero_variance", *_undelivered(0.0)) for n in range(GROUP_SIZE)]
    rows += [(str(GroupId(LOST)), n, "dead", None, *_undelivered(None)) for n in range(GROUP_SIZE)]
    rows += [(str(GroupId(OPEN)), n, "running", None, *_undelivered(None)) for n in range(GROUP_SIZE)]
    _write_ledger(path, rows, steps, archived=archived)
    _write_files(path, steps, settings or {"seed": 0, "advantages.estimator": "grpo"})
    return MadeRun(path=path, rollouts=made, manifests=manifests)


def _made(maker: RolloutMaker, group: str, index: int, conversations: Sequence[Any]) -> MadeRollout:
    id = f"{group}-{index}"
    samples = [
        [MadeTurn(context=5, completion=8 + index), MadeTurn(context=3, completion=4)],
        [MadeTurn(context=4, completion=6)],
    ]
    member = maker.make(id, samples, group=group)
    messages: Any = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": f"It is {index}."}]
    if index < len(conversations):
        messages = conversations[index]
    content = np.frombuffer(json.dumps([messages]).encode(), np.uint8)
    columns = dataclasses.replace(member.columns, conversation=content)
    if group == str(GroupId(1)):  # the others are as an earlier release wrote them
        begun, seconds = np.array([100.2, 100.9, 101.3]), np.array([0.5, 0.3, 0.2], np.float32)
        columns = dataclasses.replace(
            columns,
            turns=dataclasses.replace(columns.turns, begun_at=begun, seconds=seconds),
            spans=[["tool", "search", 100.7, 0.15], ["grading", "judge", 101.6, 0.3], ["rollout", "", 100.1, 1.85]],
        )
    ref = write_columns(maker.store, f"rollouts/{RUN}/{id}/1.0000000000aa/columns.safetensors", columns)
    return dataclasses.replace(member, columns=columns, planned=dataclasses.replace(member.planned, columns=ref))


def _row(member: MadeRollout, index: int, step: int) -> tuple[Any, ...]:
    planned = member.planned
    result = {
        "reward": planned.reward, "turns": 3, "prompt_tokens": 9, "tool_tokens": 3,
        "completion_tokens": 18 + index, "sample_lengths": planned.sample_lengths, "version_first": 3,
        "version_last": 4, "truncated": False, "columns": dataclasses.asdict(planned.columns),
        "experts": dataclasses.asdict(planned.experts) if planned.experts else None,
        "metrics": {"engine_s": 0.5, "turns": 3.0},
    }  # fmt: skip
    state = "delivered"
    return (
        planned.group,
        index,
        state,
        None,
        step,
        planned.advantage,
        json.dumps(result),
        0,
        None,
        1,
        0xAA,
        100.0,
        2.0,
    )


def _undelivered(reward: float | None) -> tuple[Any, ...]:
    result = (
        json.dumps({"reward": reward, "completion_tokens": 7, "sample_lengths": [9]}) if reward is not None else None
    )
    generated = (50.0, 1.0) if reward is not None else (None, None)
    return (None, None, result, 0, None if reward is not None else "boom", 1, 0xBB, *generated)


def _write_ledger(path: Path, rows: list[tuple[Any, ...]], steps: int, *, archived: bool) -> None:
    connection = open_for_writing(path / "ledger.sqlite")
    connection.executemany(STATEMENTS["rollouts"], rows)
    groups = {row[0]: GroupId.parse(row[0]).ordinal for row in rows}
    states = {OPEN: "play"}
    values = [(id, ordinal, "sums", 7, states.get(ordinal, "closed"), "training") for id, ordinal in groups.items()]
    connection.executemany(STATEMENTS["groups"], values)
    batches = [(step, 1, "trained" if step == 0 else "delivered", GROUP_SIZE) for step in range(steps)]
    connection.executemany(STATEMENTS["batches"], [(*batch, None, None, None) for batch in batches])
    state = RunState(rollouts_planned=len(rows), rollouts_generated=len(rows) - 6, steps_delivered=steps)
    state.touch()
    counts = {"trained": 3, "delivered": 3 * (steps - 1), "filtered": 3, "dead": 3, "running": 3}
    state.rollout_counts["states"].by_name = Counter(counts)
    state.rollout_counts["reasons"].by_name = Counter(zero_variance=3)
    state.dead_jobs["rollout"].by_name = Counter(boom=3)
    connection.executemany(STATEMENTS["state"], state.take_changes()[0])
    events = [(99.0, 0, "g0000001-0", "lost", "attempt 1: the worker's lease expired")]
    connection.executemany(STATEMENTS["events"], events)
    if archived:
        connection.execute("BEGIN")
        archive(connection, at_most=1000, now=101.0)
        connection.execute("COMMIT")
    connection.close()


def _write_files(path: Path, steps: int, settings: dict[str, Any]) -> None:
    identity = {
        "run": RUN,
        "release": release(),
        "ledger": "ledger.sqlite",
        "store": "store",
        "redis": "redis://127.0.0.1:1/0",
    }
    (path / "run.json").write_text(json.dumps({**identity, "settings": settings, "changed": []}))
    lines = [
        {"step": step, "time": 1000 + step, "reward_mean": 0.25 * step, "tokens_per_s": 400_000.0 * (step + 1)}
        for step in range(steps)
    ]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    status = {
        "run": RUN, "phase": "running", "stopped_by": None, "at": time.time(), "step": steps, "steps": 10,
        "policy_version": 1, "rollouts_per_s": 2.0, "tokens_per_s": 20.0, "queued": {"rollouts": 4},
        "running_by_worker": {"host-1": 3}, "replicas": {"http://127.0.0.1:1": {"weights": "1", "serves": True}},
        "waiting_for": ["the engine: it does not answer"], "process": {"host": "here", "pid": 1},
        "event_loop_lag": {"p99_s": 0.001, "max_s": 0.002, "blocked_s": 0.0}, "other_loops": {},
    }  # fmt: skip
    (path / "status.json").write_text(json.dumps(status))
