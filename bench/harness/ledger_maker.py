"""Makes the ledger of a long run with SQL: millions of closed rollouts in a minute or two, none of them played."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from headpond.ids import new_execution
from headpond.ledger import queries
from headpond.ledger.archive import DEAD, DELIVERED, DERIVED, FILTERED
from headpond.ledger.schema import STATEMENTS, open_for_writing
from headpond.ledger.state_rows import RunState

ENVIRONMENT, REASON = 1, 2  # in `names`
DROPPED_EVERY = 5  # a group of five is dropped, with one dead rollout in every tenth of these
CLOSED_OUT_OF_ORDER = 512  # groups: so many are open at once, and they close in any order
AT_ONCE = 25_000  # groups in a transaction
KEPT_STEPS, KEPT_EVENTS = 50, 100_000
UNSAFE = "PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF; PRAGMA cache_size = -262144;"
NUMBERS = "WITH RECURSIVE numbers (n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM numbers WHERE n < {last})"
GROUPS = f"""
INSERT INTO made (ordinal, step)
{NUMBERS} SELECT n, iif(n % {DROPPED_EVERY} = 0, NULL, (n - 1 - n / {DROPPED_EVERY}) / {{step_groups}}) FROM numbers
ORDER BY n / {CLOSED_OUT_OF_ORDER}, random()"""
CLOSED_GROUPS = f"""
INSERT INTO closed_groups
SELECT ordinal, {ENVIRONMENT}, ordinal % 50000, step, 1790000000 + ordinal FROM made ORDER BY position"""
STATE = f"iif(step IS NOT NULL, {DELIVERED}, iif(n = 0 AND ordinal % {10 * DROPPED_EVERY} = 0, {DEAD}, {FILTERED}))"
CLOSED_ROLLOUTS = f"""
INSERT INTO closed_rollouts
{NUMBERS} SELECT ordinal, n, {STATE}, iif({STATE} = {FILTERED}, {REASON}, NULL),
    iif(step IS NULL, NULL, {DERIVED}), iif(step IS NULL, NULL, {DERIVED}), 1, abs(random()) % (1 << 48),
    abs(random()) % 2, iif(step IS NULL, NULL, random() / 9.3e18), 1 + abs(random()) % 12,
    200 + abs(random()) % 2000, abs(random()) % 4000, 100 + abs(random()) % 30000, 1 + abs(random()) % 3,
    coalesce(step, ordinal / {{step_groups}}), coalesce(step, ordinal / {{step_groups}}), 0, abs(random()) % 50 = 0, 0,
    0, abs(random()) % 100 = 0, 1790000000000 + ordinal * 1000 + n, 1000 + abs(random()) % 600000,
    800 + abs(random()) % 400000
FROM made CROSS JOIN numbers ORDER BY position, n"""
BATCHES = f"""
INSERT INTO batches (step, formation, state, rollouts)
SELECT step, 1, 'trained', count(*) FROM closed_groups JOIN closed_rollouts ON grp = ordinal
WHERE step IS NOT NULL AND state = {DELIVERED} GROUP BY step"""
HISTORIES = """
INSERT INTO histories (grp, step, content)
SELECT ordinal, step, ? FROM closed_groups WHERE step > (SELECT max(step) FROM batches) - ? ORDER BY ordinal"""
EVENTS = f"""
INSERT INTO events (at, step, subject, action, detail)
{NUMBERS} SELECT 1790000000.0 + n, (SELECT max(step) FROM batches), printf('g%07d-0', n), 'lost',
    'attempt 1: the worker''s lease expired' FROM numbers"""


def make_ledger(
    path: Path, rollouts: int = 20_000_000, *, group_size: int = 8, step_rollouts: int = 2048, untrained: int = 1
) -> None:
    """A ledger of about this many closed rollouts at `path`, in steps of `step_rollouts` that are trained and released
    except for the last `untrained` ones. Four of five groups are delivered."""
    groups, step_groups = rollouts // group_size, max(1, step_rollouts // group_size)
    with closing(open_for_writing(path)) as connection:
        connection.executescript(UNSAFE)
        connection.execute("CREATE TEMP TABLE made (position INTEGER PRIMARY KEY, ordinal INTEGER, step INTEGER)")
        connection.executemany("INSERT INTO names VALUES (?, ?)", [(ENVIRONMENT, "noop"), (REASON, "zero_variance")])
        for first in range(1, groups + 1, AT_ONCE):
            last = min(groups, first + AT_ONCE - 1)
            connection.execute("BEGIN")
            connection.execute(GROUPS.format(first=first, last=last, step_groups=step_groups))
            connection.execute(CLOSED_GROUPS)
            connection.execute(CLOSED_ROLLOUTS.format(first=0, last=group_size - 1, step_groups=step_groups))
            connection.execute("DELETE FROM made")
            connection.execute("COMMIT")
        _finish(connection, groups, group_size, untrained)


def _finish(connection: sqlite3.Connection, groups: int, group_size: int, untrained: int) -> None:
    connection.execute("BEGIN")
    connection.execute(BATCHES)
    steps = connection.execute("SELECT count(*) FROM batches").fetchone()[0]
    connection.execute("UPDATE batches SET state = 'delivered' WHERE step >= ?", (steps - untrained,))
    state = RunState(
        groups_planned=groups,
        rollouts_planned=groups * group_size,
        rollouts_generated=groups * group_size,
        groups_admitted=groups - groups // DROPPED_EVERY,
        groups_dropped=groups // DROPPED_EVERY,
        steps_delivered=steps,
        policy_version=max(0, steps - untrained),
    )
    released = ("experts_released", "columns_released", "jsonl_released")
    state.released |= dict.fromkeys(released, max(0, steps - untrained))
    state.environments["noop"].examples = 50_000
    state.environments["noop"].begun = groups
    connection.executemany(STATEMENTS["state"], state.take_changes()[0])
    connection.execute(HISTORIES, (_history(group_size), KEPT_STEPS))
    connection.execute(EVENTS.format(first=1, last=min(KEPT_EVENTS, groups)))
    for kind, counts in zip(("states", "reasons"), queries.counted(connection), strict=False):
        state.rollout_counts[kind].by_name = Counter[str](counts)
    connection.executemany(STATEMENTS["state"], state.take_changes()[0])
    connection.execute("COMMIT")


def _history(group_size: int) -> str:
    """Of a group, with results of a usual size."""
    execution = new_execution()
    blobs = {
        kind: {"key": f"rollouts/{execution}/g0000001-0/1.{execution}/{kind}.safetensors", "size": 1 << 20,
               "checksum": "0123456789abcdef"}
        for kind in ("columns", "experts")
    }  # fmt: skip
    result = {"reward": 1.0, "sample_lengths": [8192], **blobs, "completion_tokens": 4096}
    rollout = {"state": "delivered", "reason": None, "advantage": 0.5, "masked": 0, "error": None, "result": result}
    job = {"kind": "play", "state": "settled", "attempt": 1, "failures": 0, "losses": 0, "error": None}
    return json.dumps(
        {
            "rollouts": [{"index": index, **rollout} for index in range(group_size)],
            "jobs": [{"id": f"g0000001-{index}", **job} for index in range(group_size)],
        }
    )
