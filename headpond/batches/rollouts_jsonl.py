"""`rollouts.<execution>.jsonl`: one line per rollout of a step, for people and scripts that analyse a run."""

import json
from collections.abc import Iterator

from headpond.batches.plan import BatchPlan, BatchRollout
from headpond.store import BlobRef, Store
from headpond.store.columns import read_columns


def write_rollouts(store: Store, plan: BatchPlan, key: str) -> BlobRef:
    return store.put(key, (line for rollout in plan.rollouts for line in _line(store, plan, rollout)))


def _line(store: Store, plan: BatchPlan, rollout: BatchRollout) -> Iterator[bytes]:
    columns = read_columns(store, rollout.columns)
    fields = {
        "step": plan.step,
        "rollout": rollout.rollout,
        "group": rollout.group,
        "env": rollout.env,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "masked": rollout.masked,
        "versions": [rollout.version_first, rollout.version_last],
        "inexact_tokens": rollout.inexact_tokens,
        "sample_lengths": rollout.sample_lengths,
        "truncated": bool(columns.truncated.any()),
        "error": columns.error or None,
        "metrics": dict(columns.metrics),
        "fields": {name: values.tolist() for name, values in columns.sample_fields.items()},
    }
    head = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False)[:-1]
    # The conversation is JSON already: copied, not parsed. Line breaks in JSON are whitespace between tokens.
    conversation = columns.conversation.tobytes().replace(b"\n", b" ") or b"null"
    yield head.encode() + b',"conversation":' + conversation + b"}\n"
