"""Sealed steps whose rollouts a real model played: logprobs and experts are its own, by the weights of each token."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from headpond.batches import BatchPlan, BatchRollout, RunStatus, seal_manifest, write_status
from headpond.batches.plan import PackingRules
from headpond.batches.writer import encode_rank
from headpond.demo import tiny_moe
from headpond.demo.tiny_moe import Array, Weights
from headpond.renderers import bytes_chatml
from headpond.store.columns import Columns, TurnTable, write_columns
from headpond.store.experts import Chunk, seal_experts
from headpond.store.files import FileStore
from support.stores import directory_store

ROLLOUTS, TOKENS = 8, 6
TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True)
class Played:
    """One turn; the first half of its completion was sampled by the lower version."""

    prompt: Array
    completion: Array
    logprobs: Array
    rows: Array
    versions: Array

    @property
    def ids(self) -> Array:
        return np.concatenate([self.prompt, self.completion])

    def shifted(self, column: str) -> "Played":
        """With one column moved by one token."""
        moved = {column: np.roll(getattr(self, column), 1, axis=0)}
        return Played(**{**self.__dict__, **moved})


def windows_of(ids: Array) -> Array:
    """[tokens + 1, WINDOW]: row p has the tokens before position p, the last one last."""
    padded = np.concatenate([np.full(tiny_moe.WINDOW, tiny_moe.BEFORE), ids])
    return sliding_window_view(padded, tiny_moe.WINDOW)


def play(weights: Mapping[int, Weights], generator: np.random.Generator) -> Played:
    word = "".join(generator.choice(list("1234"), 2))
    prompt = bytes_chatml.encode([{"role": "user", "content": f"copy {word}"}])
    versions = np.sort(generator.choice(sorted(weights), TOKENS))
    ids, logprobs = prompt, list[float]()
    rows = tiny_moe.forward(weights[int(versions[0])], windows_of(ids)[1:-1]).routes
    for version in versions.tolist():
        model = weights[version]
        passed = tiny_moe.forward(model, windows_of(ids)[-1:])
        logs = tiny_moe.log_softmax(tiny_moe.logits(model, passed.hidden) / TEMPERATURE)[0]
        token = generator.choice(len(logs), p=np.exp(logs.astype(np.float64)) / np.exp(logs.astype(np.float64)).sum())
        ids, rows = np.append(ids, np.int32(token)), np.concatenate([rows, passed.routes])
        logprobs.append(float(logs[token]))
    return Played(
        prompt=prompt,
        completion=ids[len(prompt) :],
        logprobs=np.array(logprobs, np.float32),
        rows=rows,
        versions=versions,
    )


def seal_step(run_dir: Path, step: int, weights: Mapping[int, Weights], *, shifted: str | None = None) -> None:
    """The only step of a run that has ended. `shifted` moves a column of one rollout by one token."""
    store, generator = directory_store(run_dir / "store"), np.random.default_rng(step)
    played = [play(weights, generator) for _ in range(ROLLOUTS)]
    if shifted:
        played[-1] = played[-1].shifted(shifted)
    advantages = generator.standard_normal(ROLLOUTS)
    rollouts = [_stored(store, f"s{step}-{n}", each, advantages[n]) for n, each in enumerate(played)]
    rules = PackingRules(data_ranks=1, seq_len=128, pad_to_multiple_of=8)
    plan = BatchPlan(step=step, rules=rules, rollouts=tuple(rollouts))
    seal_manifest(store, plan, [encode_rank(store, plan, data_rank=0, execution="x", rollouts_jsonl=False)])
    write_status(run_dir, RunStatus(why="all steps are done", ended=True, last_step=step))


def _stored(store: FileStore, name: str, played: Played, advantage: float) -> BatchRollout:
    columns = write_columns(store, f"rollouts/{name}/columns", _columns(name, played))
    part = store.part(f"rollouts/{name}/experts", reserve_head=True)
    part.append(np.ascontiguousarray(played.rows))
    valid = np.ones(len(played.ids), np.uint8)
    valid[-1] = 0
    experts = seal_experts(
        store,
        f"rollouts/{name}/experts",
        part,
        chunks=[Chunk(sample=0, first=0, rows=len(played.rows))],
        routed_valid=valid,
        row=(tiny_moe.LAYERS, tiny_moe.TOPK),
        dtype=np.dtype(np.uint8),
        rollout=name,
        attempt=1,
    )
    return BatchRollout(
        rollout=name,
        group="g",
        env="copy",
        reward=float(advantage > 0),
        advantage=advantage,
        version_first=int(played.versions.min()),
        version_last=int(played.versions.max()),
        sample_lengths=(len(played.ids),),
        columns=columns,
        experts=experts,
    )


def _columns(name: str, played: Played) -> Columns:
    prompt, tokens = len(played.prompt), len(played.ids)
    words = {"finish_reason": ["length"], "agent": [""], "engine": [""], "sampling": ["{}"]}
    zeros = np.zeros(prompt)

    def one(dtype: str, value: float) -> Array:
        return np.array([value], dtype)

    return Columns(
        rollout=name,
        attempt=1,
        logprobs_mode="processed",
        input_ids=played.ids.astype(np.int32),
        loss_mask=np.concatenate([zeros, np.ones(TOKENS)]).astype(np.uint8),
        logprobs=np.concatenate([zeros, played.logprobs]).astype(np.float32),
        sample_offsets=np.array([0, tokens], np.int64),
        first_prompt_length=one("i4", prompt),
        truncated=one("u1", 0),
        overlong_prompt=one("u1", 0),
        turns=TurnTable(
            sample=one("i4", 0),
            start=one("i8", prompt),
            end=one("i8", tokens),
            version_first=one("i4", played.versions.min()),
            version_last=one("i4", played.versions.max()),
            version_exact=one("u1", 1),
            temperature=one("f4", TEMPERATURE),
            reward=one("f8", np.nan),
            **{word: one("i4", 0) for word in words},
            words=words,
        ),
        span_turn=np.zeros(TOKENS, np.int32),
        span_start=np.arange(prompt, tokens, dtype=np.int64),
        span_version=played.versions.astype(np.int32),
        conversation=np.frombuffer(json.dumps([]).encode(), np.uint8),
    )


def weights_bytes(run_dir: Path) -> dict[str, Any]:
    """Checkpoint and weights of a trainer, by file."""
    files = [run_dir / "checkpoint.safetensors", *(run_dir / "weights").rglob("*.*")]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files if path.is_file()}
