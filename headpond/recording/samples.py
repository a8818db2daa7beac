"""The turns of a rollout, and the earlier turn that the prompt of each continues, token by token.

Memory keeps only a turn's additions; its routed rows are written to the experts file. Sealing
decides which sample a turn belongs to (`sample_tree.py`). It uses these additions and the order in
which the requests arrived, not the order of commits.
"""

from bisect import bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headpond.errors import Invariant, PolicyFailure
from headpond.fields import Array
from headpond.turn import (
    Fingerprint,
    Ids,
    Logprobs,
    Mask,
    OpenSample,
    Routes,
    Rows,
    SaidVersion,
    Turn,
    TurnMetadata,
    VersionSpan,
)

NO_TURN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnDelta:
    """A turn's additions to the sequence that its prompt begins with. Its routed rows are in the
    experts file."""

    arrival: int  # Number of its request in the session.
    # The earlier-arrived turn with the longest sequence, prompt and completion, that the
    # prompt begins with; -1 for none.
    base: int
    prefix_tokens: int  # Length of that sequence.
    prompt_ids: Ids  # The prompt from `prefix_tokens` on.
    completion_ids: Ids
    completion_logprobs: Logprobs
    completion_mask: Mask | None = None
    # Its routed rows in the experts file: position of the first row in its sequence, and
    # their number.
    chunks: tuple[tuple[int, int], ...]
    agent: str
    engine: str
    version_first: int  # The lowest policy version that may have sampled one of its tokens.
    version_last: int  # The highest one.
    temperature: float
    sampling: str
    finish_reason: str
    truncated: bool
    overlong_prompt: bool
    matches: int  # Number of open samples that the prompt began with.
    unknown_logprobs: int = 0  # Completion tokens without a logprob. They are masked.
    # Whether routed experts were requested and the response had none of the new rows.
    routes_absent: bool = False
    # The trainer's fields in the engine's response: one number, or one per completion token.
    fields: Mapping[str, Array] = field(default_factory=dict[str, Array])
    # Whether `version_first`, or the versions in `version_spans`, sampled every token.
    version_exact: bool = False
    # The spans of several versions, if the response states them.
    version_spans: tuple[VersionSpan, ...] = ()
    # `TurnMetadata.answered_at`; None once the version is settled.
    answered_at: float | None = None
    begun_at: float = 0.0  # `begun_at` and `seconds` are those of `TurnMetadata`.
    seconds: float = 0.0
    # The tokens that each completion token was drawn from, one set after the other.
    support_ids: Ids | None = None
    support_lengths: Ids | None = None

    @property
    def nbytes(self) -> int:
        optional = (self.completion_mask, self.support_ids, self.support_lengths)
        arrays = [array for array in optional if array is not None] + list(self.fields.values())
        arrays += [self.prompt_ids, self.completion_ids, self.completion_logprobs]
        return sum(array.nbytes for array in arrays)

    @property
    def start(self) -> int:
        """Position of its completion in its sequence."""
        return self.prefix_tokens + len(self.prompt_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.completion_ids)

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.chunks)


class Samples:
    """The turns of one rollout, in the order of their commits. Each extends the sequence of another
    or starts one."""

    def __init__(self, *, max_samples: int | None = None) -> None:
        self.turns: list[TurnDelta] = []
        self.nbytes = 0  # Size of the arrays of all turns.
        self.repaired: set[int] = set()  # Turns whose answers came back in another form.
        self.digests: list[int] = []  # Digest of each turn's whole sequence.
        # Length of each turn's sequence, and the turn; sorted.
        self._ends: list[tuple[int, int]] = []
        self._open: dict[int, Fingerprint] = {}  # Turns that no other turn extends.
        self._extended: set[int] = set()
        self._max_samples = max_samples

    def open_samples(self) -> dict[int, OpenSample]:
        """Turns that no other turn extends, in the order of `read_turn`'s argument."""
        # An open sample needs its last token's row: the response that sampled the token normally has none.
        return {
            turn: OpenSample(sequence=sequence, rows_from=max(0, sequence.tokens - 1))
            for turn, sequence in self._open.items()
        }

    def place(
        self, turn: Turn, metadata: TurnMetadata, *, arrival: int, read_with: Mapping[int, OpenSample]
    ) -> tuple[TurnDelta, list[Rows]]:
        """Return what the turn adds, and the rows of its chunks. No side effects.

        `read_with`: the open samples when its request left. A turn that was committed since may be
        a better match.
        """
        base = self._base(turn, arrival, read_with)
        prefix_tokens = self.turns[base].end if base != NO_TURN else 0
        if base == NO_TURN or base in self._extended:
            self._require_room()
        prompt_ids = turn.prompt_ids[prefix_tokens - turn.prefix_tokens :]
        runs = _runs(turn.routes, max(0, prefix_tokens - 1), turn.tokens) if turn.routes else []
        delta = TurnDelta(
            arrival=arrival,
            base=base,
            prefix_tokens=prefix_tokens,
            prompt_ids=prompt_ids.copy(),  # a view would keep the whole array alive
            completion_ids=turn.completion_ids.copy(),
            completion_logprobs=turn.completion_logprobs.copy(),
            completion_mask=_mask_of(turn, metadata.completion_mask),
            chunks=tuple((first, len(rows)) for first, rows in runs),
            agent=metadata.agent,
            engine=metadata.engine,
            **_versions(turn, metadata),
            begun_at=metadata.begun_at,
            seconds=metadata.seconds,
            temperature=metadata.temperature,
            sampling=metadata.sampling,
            finish_reason=turn.finish_reason or "",
            truncated=turn.truncated,
            overlong_prompt=turn.overlong_prompt,
            matches=turn.matches,
            unknown_logprobs=turn.unknown_logprobs,
            routes_absent=turn.routes_absent,
            fields=turn.fields,
            support_ids=turn.sampling_mask.ids.copy() if turn.sampling_mask else None,
            support_lengths=turn.sampling_mask.lengths.copy() if turn.sampling_mask else None,
        )
        return delta, [rows for _, rows in runs]

    def add(self, delta: TurnDelta, sequence: Fingerprint | None = None) -> None:
        """Add a turn. `sequence` is the fingerprint of prompt and completion, if it is already
        computed."""
        index = len(self.turns)
        if sequence is None:
            base = self._open.get(delta.base) or Fingerprint.of(self.ids(delta.base))
            sequence = base.extended(delta.prompt_ids, delta.completion_ids)
        self.turns.append(delta)
        self.digests.append(sequence.ids_digest)
        self.nbytes += delta.nbytes
        insort(self._ends, (delta.end, index))
        self._extended.add(delta.base)
        self._open.pop(delta.base, None)
        if not self._extend_with_later(index):
            self._open[index] = sequence

    def unsettled(self) -> list[int]:
        """Turns whose version depends on their replica's report after the response."""
        return [index for index, turn in enumerate(self.turns) if turn.answered_at is not None]

    def settle_version(self, index: int, report: SaidVersion | None) -> None:
        """Settle a turn's version. `report` is its replica's statement after the response; None if
        there was none."""
        turn = self.turns[index]
        versions = {turn.version_first, turn.version_last, report.version if report else turn.version_first}
        self.turns[index] = replace(
            turn,
            version_first=min(versions),
            version_last=max(versions),
            version_exact=turn.version_exact and report is not None and report.exact and len(versions) == 1,
            answered_at=None,
        )

    def ids(self, turn: int) -> Ids:
        """Prompt and completion of a turn."""
        parts = list[Ids]()
        while turn != NO_TURN:
            delta = self.turns[turn]
            parts += [delta.completion_ids, delta.prompt_ids]
            turn = delta.base
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)

    def history(self, turn: int) -> tuple[Ids, int, int]:
        """The tokens of a turn, the position of its completion, and the first routed row that the
        next request asks for."""
        ids = self.ids(turn)
        completion = len(self.turns[turn].completion_ids) if turn != NO_TURN else 0
        return ids, len(ids) - completion, max(0, len(ids) - 1)

    def by_arrival(self) -> list[int]:
        return sorted(range(len(self.turns)), key=lambda turn: self.turns[turn].arrival)

    def _require_room(self) -> None:
        if self._max_samples is not None and len(self.turns) - len(self._extended - {NO_TURN}) >= self._max_samples:
            raise PolicyFailure(
                f"the rollout breaks its prefix too often: {self._max_samples} samples are allowed (policy.max_samples)"
            )

    def _base(self, turn: Turn, arrival: int, read_with: Mapping[int, OpenSample]) -> int:
        base, prefix = NO_TURN, Fingerprint()
        if turn.extends is not None:
            base = list(read_with)[turn.extends]
            prefix = read_with[base].sequence
        if turn.prefix_tokens != prefix.tokens:
            raise Invariant(f"the turn extends {turn.prefix_tokens} tokens, the sample has {prefix.tokens}")
        bounds = (max(1, prefix.tokens) - 1, turn.prompt_tokens)
        first, last = (bisect_right(self._ends, (tokens, len(self.turns))) for tokens in bounds)
        candidates = self._ends[first:last]
        arrived_before = [(tokens, other) for tokens, other in candidates if self.turns[other].arrival < arrival]
        if not arrived_before or all(other == base for _, other in arrived_before):
            return base
        lengths = sorted({tokens - prefix.tokens for tokens, _ in arrived_before})
        digests = dict(zip(lengths, prefix.ids_digests(turn.prompt_ids, lengths), strict=True))
        same = [
            (tokens, other)
            for tokens, other in arrived_before
            if self.digests[other] == digests[tokens - prefix.tokens]
        ]
        if not same:
            return base
        longest = same[-1][0]
        ties = [other for tokens, other in same if tokens == longest]
        return min(ties, key=lambda other: (other in self._extended, self.turns[other].arrival))

    def _extend_with_later(self, index: int) -> bool:
        """Rebase turns of later requests, committed before, whose prompts begin with the sequence
        of this one.

        Return whether there were any.
        """
        turn, extended = self.turns[index], False
        for number, other in enumerate(self.turns[:index]):
            base_end = self.turns[other.base].end if other.base != NO_TURN else 0
            if other.arrival < turn.arrival or not base_end < turn.end <= other.start:
                continue
            if np.array_equal(self.ids(number)[: turn.end], self.ids(index)):
                shorter = other.prompt_ids[turn.end - base_end :].copy()
                self.turns[number] = replace(other, base=index, prefix_tokens=turn.end, prompt_ids=shorter)
                self._extended.add(index)
                extended = True
        return extended


def _versions(turn: Turn, metadata: TurnMetadata) -> dict[str, Any]:
    """The versions of a turn. They are exact if the response states the versions of its tokens.

    A version stated for the end of the response is exact if the replica reported the same one
    before.
    """
    reported = metadata.version
    versions = reported.version, turn.version if turn.version is not None else reported.version
    if turn.version_spans:
        versions = tuple(span.version for span in turn.version_spans)
    pending = not turn.version_spans and turn.version is None
    return {
        "version_first": min(versions),
        "version_last": max(versions),
        "version_exact": bool(turn.version_spans) or (reported.exact and len(set(versions)) == 1),
        "version_spans": turn.version_spans if len(turn.version_spans) > 1 else (),
        "answered_at": metadata.answered_at if pending else None,
    }


def _mask_of(turn: Turn, requested: Mask | None) -> Mask | None:
    """The tokens to train on: the caller wants them, and the response has all their values."""
    length = len(turn.completion_ids)
    if requested is not None and len(requested) < length:
        raise Invariant(f"a completion mask of {len(requested)} entries for {length} tokens")
    masks = [mask[:length] for mask in (requested, turn.completion_mask) if mask is not None]
    return np.minimum.reduce(masks) if masks else None


def _runs(routes: Routes, first: int, stop_position: int) -> list[tuple[int, Rows]]:
    """Runs of consecutive valid rows from position `first` up to `stop_position`, each with the
    position of its first row."""
    begin, end = max(0, first - routes.first), min(len(routes.rows), stop_position - routes.first)
    if end <= begin:
        return []
    if routes.valid is None:
        return [(routes.first + begin, routes.rows[begin:end])]
    edges = np.flatnonzero(np.diff(routes.valid[begin:end], prepend=False, append=False)) + begin
    return [(routes.first + start, routes.rows[start:stop]) for start, stop in edges.reshape(-1, 2).tolist()]
