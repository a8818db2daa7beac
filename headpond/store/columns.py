"""A rollout's `columns` file: its samples one after the other, the turns that made them, its
conversation.

Encoding needs nothing else but the routed experts, which have a file of their own (experts.py).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from headpond.errors import BlobCorrupt, StageError
from headpond.fields import DTYPES as FIELD_DTYPES
from headpond.store import tensors
from headpond.store.base import BlobRef, Store
from headpond.store.tensors import Array

FORMAT = "headpond.columns.1"
TURN, TOKEN_FIELD, SAMPLE_FIELD = "turn.", "extra.", "sample_extra."  # prefixes of array names in the file

# The dtype of every array by its axis: T tokens of all samples, S samples, S+1 their bounds, N
# turns, V one entry per version of each turn that several versions sampled.
DTYPES = {
    "T": {"input_ids": "i4", "loss_mask": "u1", "logprobs": "f4"},
    "S": {"first_prompt_length": "i4", "truncated": "u1", "overlong_prompt": "u1"},
    "S+1": {"sample_offsets": "i8"},
    "N": {
        "turn.sample": "i4",
        "turn.start": "i8",
        "turn.end": "i8",
        "turn.version_first": "i4",
        "turn.version_last": "i4",
        "turn.version_exact": "u1",
        "turn.temperature": "f4",
        "turn.reward": "f8",
        "turn.finish_reason": "i4",
        "turn.agent": "i4",
        "turn.engine": "i4",
        "turn.sampling": "i4",
    },
    "V": {"span_turn": "i4", "span_start": "i8", "span_version": "i4"},
}
# Arrays that files of earlier releases lack.
ADDED = {"S": {"parent": "i4", "agent": "i4"}, "N": {"turn.unseen": "u1", "turn.begun_at": "f8", "turn.seconds": "f4"}}


@dataclass(frozen=True, kw_only=True)
class TurnTable:
    """One entry per turn, in the order of arrival."""

    sample: Array
    start: Array  # index in T at which its completion begins
    end: Array
    version_first: Array  # lowest policy version that may have sampled one of its tokens
    version_last: Array  # the highest one
    # 1 if `version_first`, or the versions in `span_version`, sampled every token
    version_exact: Array
    temperature: Array
    reward: Array  # `Score.turn_rewards`; NaN if there are none
    finish_reason: Array  # this and the next three are indices into `words[<field name>]`
    agent: Array
    engine: Array
    sampling: Array  # top_p and other parameters, a JSON object
    words: Mapping[str, list[str]]
    unseen: Array | None = None  # 1 if no client saw its answer: its loss mask is then 0
    # time of its request, by the clock of the process that recorded it; 0 if unknown
    begun_at: Array | None = None
    seconds: Array | None = None  # time from its request to its response

    @property
    def last_finish_reason(self) -> str:
        return self.words["finish_reason"][self.finish_reason[-1]] if len(self.finish_reason) else ""


@dataclass(frozen=True, kw_only=True)
class Columns:
    rollout: str
    attempt: int
    logprobs_mode: str  # processed or raw
    error: str = ""  # the reason why the rollout failed: its loss mask is then 0
    input_ids: Array
    loss_mask: Array
    logprobs: Array
    sample_offsets: Array
    first_prompt_length: Array  # prompt tokens of the turn that began the sample
    truncated: Array
    overlong_prompt: Array
    parent: Array | None = None  # the sample that each sample branches off or follows; -1 for none
    # the agent that began each sample: indices into `turns.words["agent"]`
    agent: Array | None = None
    turns: TurnTable
    # the rollout's other activities, beside its turns (headpond/spans.py): kind, name, begin,
    # seconds
    spans: list[list[Any]] = field(default_factory=list[list[Any]])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    # [T] each: the declared fields that have a value, see headpond/fields.py
    token_fields: Mapping[str, Array] = field(default_factory=dict[str, Array])
    sample_fields: Mapping[str, Array] = field(default_factory=dict[str, Array])  # [S] each
    conversation: Array = field(default_factory=lambda: np.empty(0, np.uint8))  # JSON
    # turns that several versions sampled, by the engine's report: one entry per version, in
    # order
    span_turn: Array = field(default_factory=lambda: np.empty(0, np.int32))
    # index in T at which that version begins; it ends at the turn's next entry, or with the
    # turn
    span_start: Array = field(default_factory=lambda: np.empty(0, np.int64))
    span_version: Array = field(default_factory=lambda: np.empty(0, np.int32))
    # the tokens that each token was drawn from, with `engine.sampling_masks`; see `support`
    support_ids: Array | None = None
    support_offsets: Array | None = None  # [T + 1]: their bounds in `support_ids`

    def __post_init__(self) -> None:
        tokens, samples, turns = self.input_ids.size, self.truncated.size, self.turns.sample.size
        lengths = {"T": tokens, "S": samples, "S+1": samples + 1, "N": turns, "V": self.span_turn.size}
        arrays = _arrays(self)
        for axis, dtypes in DTYPES.items():
            for name, dtype in dtypes.items():
                _check(name, arrays[name], dtype, lengths[axis])
        for axis, dtypes in ADDED.items():
            for name in dtypes.keys() & arrays.keys():
                _check(name, arrays[name], dtypes[name], lengths[axis])
        for values, length in ((self.token_fields, tokens), (self.sample_fields, samples)):
            for name, array in values.items():
                if array.dtype not in FIELD_DTYPES.values() or array.shape != (length,):
                    raise StageError(f"field {name} is {array.dtype} {array.shape}, expected ({length},)")
        offsets = self.sample_offsets
        if offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 0).any():
            raise StageError(f"columns of rollout {self.rollout}: sample_offsets do not rise from 0 to {tokens}")

        if self.support_ids is not None and self.support_offsets is not None:
            _check("support_offsets", self.support_offsets, "i8", tokens + 1)
            _check("support_ids", self.support_ids, "i4", int(self.support_offsets[-1]))

    def support(self, token: int) -> Array:
        """The tokens that a token was drawn from; empty for context, and without sampling masks."""
        if self.support_ids is None or self.support_offsets is None:
            return np.empty(0, np.int32)
        return self.support_ids[slice(*self.support_offsets[token : token + 2])]

    def parent_of(self, sample: int) -> int:
        """The sample that this one branches off or follows; -1 for none."""
        return -1 if self.parent is None else int(self.parent[sample])

    def agent_of(self, sample: int) -> str:
        """The agent that began the sample; empty if it has no name."""
        names, turns = self.turns.words["agent"], self.turns
        if self.agent is not None:
            return names[self.agent[sample]]
        return names[turns.agent[np.flatnonzero(turns.sample == sample)[0]]]

    def sample(self, index: int) -> slice:
        """The slice of T that holds a sample."""
        return slice(int(self.sample_offsets[index]), int(self.sample_offsets[index + 1]))


def write_columns(store: Store, key: str, columns: Columns) -> BlobRef:
    names = ("rollout", "attempt", "logprobs_mode", "error", "metrics", "spans")
    metadata = {**{name: getattr(columns, name) for name in names}, "words": columns.turns.words}
    values = {name: json.dumps(value, allow_nan=False) for name, value in metadata.items()}
    return tensors.write(store, key, _arrays(columns), {"format": FORMAT, **values})


def read_columns(store: Store, ref: BlobRef, *, verify: bool = True) -> Columns:
    """Read a columns file as views of its memory map."""
    file = tensors.read(store, ref, verify=verify)
    if file.metadata.pop("format", None) != FORMAT:
        raise BlobCorrupt(f"blob {ref.key} is not {FORMAT}")
    metadata = {name: json.loads(text) for name, text in file.metadata.items()}
    top_level, turn, by_token, by_sample = (dict[str, Array]() for _ in range(4))
    for name, array in file.arrays.items():
        prefix, dot, suffix = name.partition(".")
        {TURN: turn, TOKEN_FIELD: by_token, SAMPLE_FIELD: by_sample}.get(prefix + dot, top_level)[suffix or name] = (
            array
        )
    try:
        turns = TurnTable(**turn, words=metadata.pop("words"))
        return Columns(**top_level, turns=turns, token_fields=by_token, sample_fields=by_sample, **metadata)
    except (KeyError, TypeError, StageError) as error:
        raise BlobCorrupt(f"blob {ref.key} is not a complete columns file: {error}") from error


def _check(name: str, array: Array, dtype: str, length: int) -> None:
    if array.dtype != np.dtype(dtype) or array.shape != (length,):
        raise StageError(f"column {name} is {array.dtype} {array.shape}, expected {np.dtype(dtype)} ({length},)")


def _arrays(columns: Columns) -> dict[str, Array]:
    """Every array by its name in the file."""
    arrays = {field.name: getattr(columns, field.name) for field in fields(columns)}
    arrays |= {TURN + field.name: getattr(columns.turns, field.name) for field in fields(columns.turns)}
    arrays |= {TOKEN_FIELD + name: array for name, array in columns.token_fields.items()}
    arrays |= {SAMPLE_FIELD + name: array for name, array in columns.sample_fields.items()}
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
