"""How far rollouts came, and where they were lost: in rollouts, sampled tokens and seconds of the engine.

The archive is summed in blocks of groups. A block whose groups are all closed never changes and is read once; a call
reads as many new blocks as its time allows, so that millions of rollouts are summed over a few calls.
"""

import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from headpond.ledger import archive
from headpond.ledger.states import RolloutState

BLOCK = 1024  # groups: 8,192 rollouts of groups of 8, about 10 ms
UNGENERATED = ("planned", "submitted", "running")


class Amount(NamedTuple):
    rollouts: int = 0
    tokens: int = 0  # sampled ones
    # that the requests of their turns took, in the executions that produced the results
    seconds: float = 0.0

    def plus(self, other: "Amount") -> "Amount":
        return Amount(self.rollouts + other.rollouts, self.tokens + other.tokens, self.seconds + other.seconds)

    def minus(self, other: "Amount") -> "Amount":
        return Amount(self.rollouts - other.rollouts, self.tokens - other.tokens, self.seconds - other.seconds)


class Kind(NamedTuple):
    state: str
    reason: str | None
    generated: bool  # whether it has a result


Sums = dict[Kind, Amount]


class Waterfall:
    """The sums of one run's ledger. Not thread-safe: one call at a time."""

    def __init__(self) -> None:
        self._complete: dict[int, Sums] = {}

    def read(self, connection: sqlite3.Connection, *, budget_s: float = 0.05) -> dict[str, Any]:
        """`read_share` below 1: call again for the rest. Call in a `snapshot`."""
        deadline = time.monotonic() + budget_s
        last = connection.execute("SELECT max(ordinal) FROM closed_groups").fetchone()[0]
        blocks = range(0 if last is None else last // BLOCK + 1)
        sums, unread = list[Sums](), 0
        for block in blocks:
            if block not in self._complete and time.monotonic() < deadline:
                found, complete = _block(connection, block)
                if complete:
                    self._complete[block] = found
                sums.append(found)
            elif block in self._complete:
                sums.append(self._complete[block])
            else:
                unread += 1
        sums.append(_open(connection))
        added = _added(sums)
        delivered = _sum(amount for kind, amount in added.items() if kind.state == "delivered")
        some, are_trained = _some_steps(connection)
        trained = some if are_trained else delivered.minus(some)
        share = 1.0 if not unread else 1 - unread / len(blocks)
        return {"read_share": share, "stages": stages(added, trained if not unread else min(trained, delivered))}


def stages(sums: Sums, trained: Amount) -> list[dict[str, Any]]:
    """The stages in order, each with what reached it, what waits there and what was lost before the next one."""

    def total(*states: str, generated: bool | None = None) -> Amount:
        return _sum(
            amount for kind, amount in sums.items() if kind.state in states and generated in (None, kind.generated)
        )

    def losses(*, generated: bool) -> list[dict[str, Any]]:
        lost = {
            (kind.state, kind.reason): amount
            for kind, amount in sums.items()
            if kind.state in ("filtered", "dead") and kind.generated is generated and amount.rollouts
        }
        ordered = sorted(lost.items(), key=lambda item: -item[1].rollouts)
        return [
            {"state": state, "reason": reason, "generated": generated, **amount._asdict()}
            for (state, reason), amount in ordered
        ]

    planned = _sum(sums.values())
    generated = total(*RolloutState, "scoring", generated=True)
    waiting_for_group = total("scoring")
    delivered = total("delivered")
    batched = delivered.plus(total("batched"))
    admitted = batched.plus(total("admitted"))
    return [
        _stage("planned", planned, total(*UNGENERATED), losses(generated=False)),
        _stage("generated", generated, waiting_for_group, []),
        _stage("scored", generated.minus(waiting_for_group), total("generated"), losses(generated=True)),
        _stage("admitted", admitted, total("admitted"), []),
        _stage("batched", batched, total("batched"), []),
        _stage("delivered", delivered, delivered.minus(trained), []),
        _stage("trained", trained, Amount(), []),
    ]


def _stage(name: str, reached: Amount, waiting: Amount, lost: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, **reached._asdict(), "waiting": waiting._asdict(), "lost": lost}


def _block(connection: sqlite3.Connection, block: int) -> tuple[Sums, bool]:
    """The sums of a block of the archive, and whether all its groups are there."""
    first, after = block * BLOCK, (block + 1) * BLOCK
    rows = connection.execute(
        """SELECT state, (SELECT name FROM names WHERE id = reason), generated_ms IS NOT NULL, count(*),
            coalesce(sum(completion_tokens), 0), coalesce(sum(engine_ms), 0) / 1000.0
        FROM closed_rollouts WHERE grp >= ? AND grp < ? AND state != ? GROUP BY 1, reason, 3""",
        (first, after, archive.EVALUATED),
    ).fetchall()
    sums = {
        Kind(archive.STATES.get(state, str(state)), reason, bool(made)): Amount(*rest)
        for state, reason, made, *rest in rows
    }
    query = "SELECT count(*) FROM closed_groups WHERE ordinal >= ? AND ordinal < ?"
    closed = connection.execute(query, (max(first, 1), after)).fetchone()[0]
    return sums, closed >= after - max(first, 1)


def _open(connection: sqlite3.Connection) -> Sums:
    """The sums of the hot tables. A generated rollout whose group is not complete has the state `scoring`."""
    rows = connection.execute(
        """SELECT CASE WHEN rollouts.state = 'generated' AND groups.state IN ('play', 'score') THEN 'scoring'
                WHEN rollouts.state = 'trained' THEN 'delivered' ELSE rollouts.state END, reason,
            result IS NOT NULL, count(*),
            coalesce(sum(json_extract(result, '$.completion_tokens')), 0),
            coalesce(sum(json_extract(result, '$.metrics.engine_s')), 0.0)
        FROM rollouts JOIN groups ON grp = id WHERE purpose = 'training' GROUP BY 1, 2, 3"""
    ).fetchall()
    return {Kind(state, reason, bool(made)): Amount(*rest) for state, reason, made, *rest in rows}


def _some_steps(connection: sqlite3.Connection) -> tuple[Amount, bool]:
    """The delivered rollouts of the trained steps (and True), or of the others, whichever are fewer steps."""
    numbers = dict(connection.execute("SELECT state, count(*) FROM batches GROUP BY state").fetchall())
    few_trained = numbers.get("trained", 0) <= numbers.get("delivered", 0)
    condition = "batches.state = 'trained'" if few_trained else "batches.state = 'delivered'"
    archived = f"""
        FROM batches CROSS JOIN closed_groups USING (step) CROSS JOIN closed_rollouts ON grp = ordinal
        WHERE {condition} AND closed_rollouts.state = {archive.DELIVERED}"""
    sums = "SELECT count(*), coalesce(sum(completion_tokens), 0), coalesce(sum(engine_ms), 0) / 1000.0"
    few = Amount(*connection.execute(sums + archived).fetchone())
    sums = """SELECT count(*), coalesce(sum(json_extract(result, '$.completion_tokens')), 0),
        coalesce(sum(json_extract(result, '$.metrics.engine_s')), 0.0)"""
    hot = f"FROM rollouts JOIN batches USING (step) WHERE {condition} AND rollouts.state = 'delivered'"
    return few.plus(Amount(*connection.execute(f"{sums} {hot}").fetchone())), few_trained


def _added(many: Iterable[Sums]) -> Sums:
    added: dict[Kind, Amount] = defaultdict(Amount)
    for sums in many:
        for kind, amount in sums.items():
            added[kind] = added[kind].plus(amount)
    return added


def _sum(amounts: Iterable[Amount]) -> Amount:
    total = Amount()
    for amount in amounts:
        total = total.plus(amount)
    return total
