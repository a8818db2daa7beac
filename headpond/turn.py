"""A turn of the policy, and the vocabulary that engines, recording, renderers and services share.

`headpond.engines` makes a `Turn` from a response; `headpond.recording` stores it. Neither
imports the other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

import msgspec
import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from headpond.errors import Upstream

Message = dict[str, Any]  # A chat message with a `role`, as in OpenAI's API.
Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]
Mask = NDArray[np.uint8]
# Routed experts of consecutive tokens: `[rows, layers, topk]`.
Rows = NDArray[np.uint8] | NDArray[np.uint16]
# Body of a response. The next response reuses a bytearray as its buffer: copy the parts that
# outlive it.
Body = bytes | bytearray
Span = tuple[int, int]  # Start and end within a body, in bytes.

# Finish reason of a completion that a limit of tokens ended: `max_tokens`, or the engine's
# context length.
HIT_MAX_TOKENS = "length"
WIRE_DTYPES = {name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "int16", "int32", "int64")}
WIRE_RANGES = {name: (np.iinfo(dtype).min, np.iinfo(dtype).max) for name, dtype in WIRE_DTYPES.items()}
# Levels of lists and objects in a request or a message. orjson writes 254, of which records take
# a few.
MAX_NESTING = 100


def is_nested_too_deeply(text: bytes, value: Callable[[], object]) -> bool:
    """Return whether `value()`, the JSON of `text`, has more than MAX_NESTING levels. Short
    texts are only counted."""
    if text.count(b"[") + text.count(b"{") <= MAX_NESTING:
        return False
    level: list[Any] = [value()]
    for _ in range(MAX_NESTING):
        level = [child for node in level for child in _children(node) if isinstance(child, dict | list)]
    return bool(level)


def _children(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def ids_text(ids: Ids) -> bytes:
    """Print the ids like engines do, `1,22,333`, without the brackets."""
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


class Fingerprint:
    """Length and xxh3-128 of a token sequence, as text and as an array. It recognises the
    sequence at the start of a later prompt without storing it. Immutable."""

    __slots__ = ("_ids", "_text", "text_bytes", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.text_bytes = 0  # Length of `ids_text`.
        self._text = xxhash.xxh3_128()
        self._ids = xxhash.xxh3_128()

    @classmethod
    def of(cls, ids: Ids) -> Self:
        return cls().extended(ids)

    def extended(self, *parts: Ids, text: bytes | None = None) -> Self:
        """Return the fingerprint of this sequence followed by `parts`. `text` is the `ids_text`
        of the first part, if available."""
        longer = type(self)()
        longer.tokens, longer.text_bytes = self.tokens, self.text_bytes
        longer._text, longer._ids = self._text.copy(), self._ids.copy()
        for ids in parts:
            longer._append(ids, text)
            text = None
        return longer

    def _append(self, ids: Ids, text: bytes | None) -> None:
        if not len(ids):
            return
        text = ids_text(ids) if text is None else text
        if self.tokens:
            self._text.update(b",")
            self.text_bytes += 1
        self._text.update(text)
        self._ids.update(ids.data)
        self.text_bytes += len(text)
        self.tokens += len(ids)

    def ids_digests(self, ids: Ids, lengths: Iterable[int]) -> Iterator[int]:
        """Yield `ids_digest` of this sequence followed by the first `length` of `ids`, for
        rising lengths."""
        state, done = self._ids.copy(), 0
        for length in lengths:
            state.update(ids[done:length].data)
            done = length
            yield state.intdigest()

    @property
    def text_digest(self) -> int:
        return self._text.intdigest()

    @property
    def ids_digest(self) -> int:
        return self._ids.intdigest()


class CheckRoutes(StrEnum):
    """Which new rows are checked for zeros. An engine that captured no routes for a token sends
    a row of zeros."""

    SAMPLE = "sample"
    ALL = "all"
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class RouteFormat:
    """Shape and type of an engine's routed rows. The configuration sets them, the first rows
    received complete them."""

    # Hidden layers of the model, dense ones included. Required for SGLang's bare string,
    # which has no shape.
    layers: int | None = None
    topk: int | None = None
    # Experts per layer. Up to 256 are stored as u8, more as u16. An unknown number, sent as
    # wide integers, is stored as u16 too.
    experts: int | None = None
    wire: str | None = None  # Integer type on the wire.
    check: CheckRoutes = CheckRoutes.SAMPLE

    @cached_property
    def row_bytes(self) -> int | None:
        """Size of one row on the wire."""
        if self.layers is None or self.topk is None or self.wire is None:
            return None
        return self.layers * self.topk * WIRE_DTYPES[self.wire].itemsize

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of stored rows."""
        narrow = self.wire == "uint8" or (self.experts is not None and self.experts <= 256)
        return np.dtype(np.uint8 if narrow else np.uint16)

    def learned(self, *, layers: int, topk: int, wire: str) -> "RouteFormat":
        """Return this format completed by a payload's statement. Raise Upstream if the two
        contradict."""
        if (self.layers, self.topk, self.wire) == (layers, topk, wire):
            return self
        for name, expected, stated in [
            ("layers", self.layers, layers),
            ("top-k", self.topk, topk),
            ("type", self.wire, wire),
        ]:
            if expected not in (None, stated):
                raise Upstream(f"routed experts: {name} is {stated}, but {expected} is configured or came before")
        if wire not in WIRE_DTYPES:
            raise Upstream(f"routed experts: type {wire!r} is not one of {', '.join(WIRE_DTYPES)}")
        if layers < 1 or topk < 1:
            raise Upstream(f"routed experts: {layers} layers and top-k {topk}; neither can be zero")
        if self.experts is not None and self.experts - 1 > WIRE_RANGES[wire][1]:
            raise Upstream(f"routed experts: {wire} cannot number the {self.experts} experts of the configuration")
        return replace(self, layers=layers, topk=topk, wire=wire)


ANY_FORMAT = RouteFormat()


class Routes(msgspec.Struct, frozen=True, kw_only=True):
    """The new rows of one response."""

    first: int  # Token position of the first row.
    rows: Rows
    # False where the engine captured nothing; None if every row is valid.
    valid: NDArray[np.bool_] | None
    # The format completed by these rows. Pass it to `read_turn` with the next response.
    format: RouteFormat


@dataclass(frozen=True, kw_only=True)
class SamplingMask:
    """The tokens that each completion token was drawn from: ragged, one set after the other."""

    ids: Ids
    lengths: Ids  # Lengths of the sets, one per completion token.

    @classmethod
    def empty(cls) -> Self:
        return cls(ids=np.empty(0, np.int32), lengths=np.empty(0, np.int32))

    def first(self, tokens: int) -> "SamplingMask":
        return SamplingMask(ids=self.ids[: int(self.lengths[:tokens].sum())], lengths=self.lengths[:tokens])

    def followed_by(self, other: "SamplingMask") -> "SamplingMask":
        return SamplingMask(
            ids=np.concatenate([self.ids, other.ids]), lengths=np.concatenate([self.lengths, other.lengths])
        )


class OpenSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that the next turn may extend."""

    sequence: Fingerprint
    # First token position whose routed row is still needed: normally `sequence.tokens - 1`.
    rows_from: int


@dataclass(frozen=True)
class SaidVersion:
    """The policy version of a replica's weights at one moment."""

    version: int
    exact: bool  # Whether the replica itself named the version.


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Completion tokens `[start, end)`, sampled by the weights of one policy version."""

    version: int
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a sample that one response adds. Its arrays do not reference the response
    body."""

    # Index of the longest open sample that the prompt begins with; None starts a new sample.
    extends: int | None
    matches: int  # Number of open samples that the prompt begins with.
    prefix_tokens: int  # Length of the extended sample: prompt ids that are not repeated here.
    prompt_ids: Ids  # The prompt from `prefix_tokens` on.
    completion_ids: Ids
    completion_logprobs: Logprobs
    # Rows from the sample's `rows_from` on; None if the response has none of them.
    routes: Routes | None
    sequence: Fingerprint  # Fingerprint of the whole prompt and completion.
    finish_reason: str | None
    # Policy version when the completion ended, if the response states only that.
    version: int | None
    message: bytes | None  # The assistant's message as JSON; None from token-in/token-out.
    truncated: bool  # Whether tokens beyond `max_seq_len` were cut.
    overlong_prompt: bool  # Whether the prompt alone exceeds `max_seq_len`.
    routes_span: Span | None = None  # Position of the routed experts in the body.
    # Whether the engine ended the completion before the policy did. Such a turn is continued,
    # never recorded.
    aborted: bool = False
    completion_mask: Mask | None = None  # Which completion tokens may be trained on; None for all.
    unknown_logprobs: int = 0  # Completion tokens without a logprob: masked.
    # Whether routed experts were requested and the response has none of the new rows.
    routes_absent: bool = False
    # The sampling mask, if `engine.sampling_masks` is set.
    sampling_mask: SamplingMask | None = None
    # Declared fields for the trainer that the response has: one number, or one per completion
    # token.
    fields: Mapping[str, NDArray[Any]] = msgspec.field(default_factory=dict[str, NDArray[Any]])
    # The policy versions of all completion tokens, in order, if the response states them.
    version_spans: tuple[VersionSpan, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + len(self.prompt_ids)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + len(self.completion_ids)


@dataclass(frozen=True, kw_only=True)
class TurnMetadata:
    """Recorded facts of a turn that are not in its response."""

    agent: str = ""
    engine: str = ""  # URL of the replica.
    # Version of the replica's weights before the request left. Used if the response states
    # none.
    version: SaidVersion = SaidVersion(0, exact=False)
    # Arrival of the response, by the monotonic clock. The replica's later report decides
    # about `version` when the session is sealed. None if no report is needed.
    answered_at: float | None = None
    begun_at: float = 0.0  # Start of the request by the recording process's clock; 0 if unknown.
    seconds: float = 0.0  # Time until the response arrived, repeated requests included.
    temperature: float = 1.0
    # Sampling fields that change the distribution (top_p and others), as JSON.
    sampling: str = "{}"
    completion_mask: Mask | None = None  # Which completion tokens to train on; None for all.
