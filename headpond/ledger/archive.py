"""Closed groups: a few statements move them from the hot tables into compact ones, at about 100 bytes a rollout.

The archive keeps ids, state, reason, step, reward, advantage, lengths, versions, times and execution of every rollout;
`histories` keeps everything else of the groups that were closed last. All of it runs inside SQLite, without the GIL.
"""

import sqlite3

from headpond.ids import COLUMNS_FILE, EXPERTS_FILE, execution_directory
from headpond.ledger.states import RolloutState

# `closed_rollouts.state`; a state that no closed rollout has is kept as its text
FILTERED, DELIVERED, DEAD, EVALUATED = 0, 1, 2, 3
CODES = {
    RolloutState.FILTERED: FILTERED,
    RolloutState.DELIVERED: DELIVERED,
    RolloutState.DEAD: DEAD,
    RolloutState.EVALUATED: EVALUATED,
}
STATES = {code: state for state, code in CODES.items()}
# `closed_rollouts.columns` and `.experts` of a file whose key follows from the rollout and its
# execution
DERIVED = 1

TABLES = """
CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE closed_groups (
    ordinal INTEGER PRIMARY KEY, environment INTEGER NOT NULL, example INTEGER NOT NULL, step INTEGER, closed_at INTEGER
);
CREATE TABLE closed_rollouts (
    grp INTEGER, idx INTEGER, state NOT NULL, reason INTEGER, columns, experts, attempt INTEGER, execution,
    reward REAL, advantage REAL, turns INTEGER, prompt_tokens INTEGER, tool_tokens INTEGER, completion_tokens INTEGER,
    samples INTEGER, version_first INTEGER, version_last INTEGER, masked INTEGER, truncated INTEGER,
    policy_failed INTEGER, failures INTEGER, losses INTEGER, generated_ms INTEGER, duration_ms INTEGER,
    engine_ms INTEGER,
    PRIMARY KEY (grp, idx)
) WITHOUT ROWID;
CREATE TABLE histories (id INTEGER PRIMARY KEY, grp INTEGER NOT NULL, step INTEGER NOT NULL, content TEXT NOT NULL);
CREATE INDEX closed_steps ON closed_groups (step) WHERE step IS NOT NULL;
CREATE INDEX groups_of_histories ON histories (grp);
"""
# SQL for a closed rollout's id
ROLLOUT = "printf('g%07d-%d', closed_rollouts.grp, closed_rollouts.idx)"
# SQL for a closed rollout's state
STATE = f"""
    CASE closed_rollouts.state WHEN {FILTERED} THEN 'filtered' WHEN {DEAD} THEN 'dead' WHEN {EVALUATED} THEN 'evaluated'
    WHEN {DELIVERED} THEN iif(batches.state = 'trained', 'trained', 'delivered') ELSE closed_rollouts.state END"""
VIEWS = f"""
CREATE VIEW all_rollouts AS
    SELECT {ROLLOUT} AS id, {STATE} AS state,
        (SELECT name FROM names WHERE names.id = reason) AS reason,
        iif(closed_rollouts.state = {DELIVERED}, closed_groups.step, NULL) AS step, reward, advantage
    FROM closed_rollouts LEFT JOIN closed_groups ON ordinal = grp LEFT JOIN batches USING (step)
    UNION ALL
    SELECT grp || '-' || idx,
        iif(rollouts.state = 'delivered' AND batches.state = 'trained', 'trained', rollouts.state), reason, step,
        json_extract(result, '$.reward'), advantage
    FROM rollouts LEFT JOIN batches USING (step);
CREATE VIEW kept_results AS
    SELECT printf('g%07d-%d', grp, json_extract(value, '$.index')) AS id, json_extract(value, '$.state') AS state,
        json_extract(value, '$.error') AS error, json_extract(value, '$.result') AS result
    FROM histories, json_each(content, '$.rollouts')
    UNION ALL SELECT grp || '-' || idx, state, error, result FROM rollouts;
CREATE VIEW kept_jobs AS
    SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.kind') AS kind,
        json_extract(value, '$.state') AS state, json_extract(value, '$.attempt') AS attempt,
        json_extract(value, '$.failures') AS failures, json_extract(value, '$.losses') AS losses,
        json_extract(value, '$.error') AS error
    FROM histories, json_each(content, '$.jobs')
    UNION ALL SELECT id, kind, state, attempt, failures, losses, error FROM jobs;
"""

# the groups that are being archived
CLOSING = "CREATE TEMP TABLE closing (id TEXT PRIMARY KEY, ordinal INTEGER NOT NULL) WITHOUT ROWID"
SELECT_CLOSING = """
INSERT INTO temp.closing SELECT id, ordinal FROM groups WHERE state = 'closed' ORDER BY ordinal LIMIT ?"""
# A commit that SQLite reports as failed may be on disk. When it is repeated, some of its groups are archived already.
FORGET_ARCHIVED = "DELETE FROM temp.closing WHERE ordinal IN (SELECT ordinal FROM closed_groups)"


def _file(kind: str, name: str) -> str:
    """SQL for a delivered rollout's key of one kind of file."""
    key = f"json_extract(result, '$.{kind}.key')"
    derived = f"rollouts.attempt IS NOT NULL AND {key} LIKE '%/{name}'"
    return f"CASE WHEN rollouts.state IN ('delivered', 'trained') THEN iif({derived}, {DERIVED}, {key}) END"


ARCHIVE_GROUPS = """
INSERT INTO closed_groups
SELECT closing.ordinal, (SELECT id FROM names WHERE name = environment), example,
    (SELECT max(step) FROM rollouts WHERE grp = closing.id), :closed_at
FROM temp.closing JOIN groups USING (id) ORDER BY closing.ordinal"""
ARCHIVE_NAMES = """
INSERT OR IGNORE INTO names (name)
SELECT environment FROM temp.closing JOIN groups USING (id)
UNION SELECT reason FROM temp.closing JOIN rollouts ON grp = closing.id WHERE reason IS NOT NULL"""
ARCHIVE_ROLLOUTS = f"""
INSERT INTO closed_rollouts
SELECT closing.ordinal, idx,
    CASE WHEN rollouts.state = 'filtered' THEN {FILTERED} WHEN rollouts.state = 'dead' THEN {DEAD}
        WHEN rollouts.state = 'evaluated' THEN {EVALUATED}
        WHEN rollouts.state IN ('delivered', 'trained') THEN {DELIVERED} ELSE rollouts.state END,
    (SELECT id FROM names WHERE name = rollouts.reason),
    {_file("columns", COLUMNS_FILE)}, {_file("experts", EXPERTS_FILE)}, rollouts.attempt, execution,
    json_extract(result, '$.reward'), advantage, json_extract(result, '$.turns'),
    json_extract(result, '$.prompt_tokens'), json_extract(result, '$.tool_tokens'),
    json_extract(result, '$.completion_tokens'), json_array_length(result, '$.sample_lengths'),
    json_extract(result, '$.version_first'), json_extract(result, '$.version_last'),
    masked, json_extract(result, '$.truncated'), json_extract(result, '$.policy_error') IS NOT NULL,
    coalesce(failures, 0), coalesce(losses, 0),
    CAST(generated_at * 1000 AS INTEGER), CAST(duration_s * 1000 AS INTEGER),
    CAST(json_extract(result, '$.metrics.engine_s') * 1000 AS INTEGER)
FROM temp.closing JOIN rollouts ON grp = closing.id
LEFT JOIN (SELECT id, failures, losses FROM jobs) AS job ON job.id = grp || '-' || idx
ORDER BY closing.ordinal, idx"""
STEPS_DELIVERED = "(SELECT json_extract(content, '$.steps_delivered') FROM state WHERE kind = 'run')"
ARCHIVE_HISTORIES = """
INSERT INTO histories (grp, step, content)
SELECT ordinal, coalesce((SELECT step FROM closed_groups WHERE ordinal = closing.ordinal), :step), json_object(
    'rollouts', (SELECT json_group_array(json_object(
        'index', idx, 'state', state, 'reason', reason, 'step', step, 'advantage', advantage, 'masked', masked,
        'error', error, 'attempt', attempt, 'generated_at', generated_at, 'duration_s', duration_s,
        'result', json(result))) FROM rollouts WHERE grp = closing.id),
    'jobs', (SELECT json_group_array(json_object(
        'id', id, 'kind', kind, 'state', state, 'attempt', attempt, 'failures', failures, 'losses', losses,
        'error', error)) FROM jobs WHERE jobs.id > closing.id || '-' AND jobs.id < closing.id || '.'))
FROM temp.closing ORDER BY ordinal"""
FORGET = (
    "DELETE FROM rollouts WHERE grp IN (SELECT id FROM temp.closing)",
    """DELETE FROM jobs WHERE id IN (SELECT jobs.id FROM temp.closing CROSS JOIN jobs
        ON jobs.id > closing.id || '-' AND jobs.id < closing.id || '.')""",
    "DELETE FROM groups WHERE id IN (SELECT id FROM temp.closing)",
)


def has_closing(connection: sqlite3.Connection) -> bool:
    """Whether there are closed groups to archive."""
    return connection.execute("SELECT 1 FROM groups WHERE state = 'closed' LIMIT 1").fetchone() is not None


def archive(connection: sqlite3.Connection, *, at_most: int, now: float, history: bool = True) -> int:
    """Move closed groups, the oldest first; returns their number. Call in a transaction, with the table CLOSING."""
    moved = connection.execute(SELECT_CLOSING, (at_most,)).rowcount
    if moved:
        connection.execute(FORGET_ARCHIVED)
        connection.execute(ARCHIVE_NAMES)
        connection.execute(ARCHIVE_GROUPS, {"closed_at": int(now)})
        connection.execute(ARCHIVE_ROLLOUTS)
        if history:
            step = connection.execute(f"SELECT coalesce({STEPS_DELIVERED}, 0)").fetchone()[0]
            connection.execute(ARCHIVE_HISTORIES, {"step": step})
        connection.execute("DELETE FROM temp.closing")
        connection.execute(SELECT_CLOSING, (at_most,))
        for statement in FORGET:
            connection.execute(statement)
        connection.execute("DELETE FROM temp.closing")
    return moved


def prune(connection: sqlite3.Connection, table: str, *, rows: int, steps: int, at_most: int) -> int:
    """Delete the oldest rows of `table` beyond `rows`, or older than the last `steps` steps; returns their number."""
    return connection.execute(
        f"""DELETE FROM {table} WHERE id < (SELECT min(id) FROM {table}) + :at_most
        AND (id <= (SELECT max(id) FROM {table}) - :rows
             OR step < {STEPS_DELIVERED} - :steps)""",
        {"at_most": at_most, "rows": rows, "steps": steps},
    ).rowcount


# executions: 12 hexadecimal digits, kept as an integer of six bytes


def execution_code(execution: str) -> int | str:
    """A text that is no usual execution id stays as it is."""
    try:
        code = int(execution, 16)
    except ValueError:
        return execution
    return code if f"{code:012x}" == execution else execution


def execution_text(code: int | str) -> str:
    return f"{code:012x}" if isinstance(code, int) else code


def file_key(
    run: str, rollout: str, attempt: int | None, execution: int | str | None, file: int | str | None, name: str
) -> str | None:
    """The key of a rollout's file, from its columns in the archive."""
    if file != DERIVED:
        return file if isinstance(file, str) else None
    if attempt is None or execution is None:
        return None
    return f"{execution_directory(run, rollout, attempt, execution_text(execution))}/{name}"
