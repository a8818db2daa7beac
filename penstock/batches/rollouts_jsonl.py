"""`rollouts.<execution>.jsonl`: a line for each rollout of a step, for people and scripts that look back."""

import json
from collections.abc import Iterator

from penstock.batches.plan import BatchPlan, BatchRollout
from penstock.store import BlobRef, Store
from penstock.store.columns import read_columns


def write_rollouts(store: Store, plan: BatchPlan, key: str) -> BlobRef:
    return store.put(key, (line for rollout in plan.rollouts for line in _line(store, plan, rollout)))


def _line(store: Store, plan: BatchPlan, planned: BatchRollout) -> Iterator[bytes]:
    columns = read_columns(store, planned.columns)
    fields = {
        "step": plan.step,
        "rollout": planned.rollout,
        "group": planned.group,
        "env": planned.env,
        "reward": planned.reward,
        "advantage": planned.advantage,
        "masked": planned.masked,
        "versions": [planned.version_first, planned.version_last],
        "sample_lengths": planned.sample_lengths,
        "truncated": bool(columns.truncated.any()),
        "error": columns.error or None,
        "metrics": dict(columns.metrics),
    }
    head = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False)[:-1]
    # The conversation is JSON already: copied, not parsed. A line break in JSON only ever separates.
    conversation = columns.conversation.tobytes().replace(b"\n", b" ") or b"null"
    yield head.encode() + b',"conversation":' + conversation + b"}\n"
