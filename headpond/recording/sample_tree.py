"""Turns -> samples: a turn extends the sample of the turn that it continues, or starts a new one.

This is a pure function of the turns and the order in which their requests arrived. If several turns
continue the same one, the first to arrive extends its sample. The others start samples with the
shared tokens, and the rows recorded for them, as context.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headpond.batches.manifest import AGENT_CHARACTERS
from headpond.recording.samples import NO_TURN, Samples, TurnDelta
from headpond.store.experts import Chunk

Offsets = NDArray[np.int64]
NO_SAMPLE = -1
# First character of agent names that are random ids.
ID_MARK = "#"


@dataclass(kw_only=True)
class Sample:
    turns: list[int]  # Its own turns: this sample trains on them.
    shared: list[int]  # The turns of other samples that its first turn continues.
    parent: int  # The sample that this one branches off or follows; -1 for none.
    agent: str
    # The position at which its first prompt differs from its agent's previous sequence.
    broken_at: int | None


@dataclass(kw_only=True)
class SampleTree:
    # The turns in the order of arrival. Indices below are positions in this list.
    turns: list[TurnDelta]
    samples: list[Sample] = field(default_factory=list[Sample])
    sample_of: list[int] = field(default_factory=list[int])
    # The routed rows that each turn adds to those of the turn before, as chunks of sample 0.
    chunks_of: list[list[Chunk]] = field(default_factory=list[list[Chunk]])
    unseen: frozenset[int] = frozenset()  # Turns whose answers no client saw: masked from the loss.
    repaired_echoes: int = 0

    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [self.turns[sample.turns[-1]].end for sample in self.samples]

    def offsets(self) -> Offsets:
        """Bounds of the samples when they are one after the other."""
        return np.cumsum([0, *self.lengths()], dtype=np.int64)

    def chunks(self) -> list[Chunk]:
        """The rows of all samples. Samples with a common beginning have its rows in common."""
        return [
            Chunk(sample=number, first=chunk.first, rows=chunk.rows, row=chunk.row)
            for number, sample in enumerate(self.samples)
            for turn in (*sample.shared, *sample.turns)
            for chunk in self.chunks_of[turn]
        ]

    def tokens_by_agent(self) -> dict[str, int]:
        """Completion tokens of each named agent, in the order of their first turns. Names are cut."""
        tokens: Counter[str] = Counter()
        for turn in self.turns:
            tokens[turn.agent[:AGENT_CHARACTERS]] += len(turn.completion_ids)
        return {name: count for name, count in tokens.items() if name}

    def inexact_tokens(self) -> int:
        """Completion tokens whose version is a range, or was not reported by the engine."""
        return sum(len(turn.completion_ids) for turn in self.turns if not turn.version_exact or turn.answered_at)

    def prompt_tokens(self) -> int:
        """Prompt tokens of the turns that started a sample."""
        return sum(self.turns[sample.turns[0]].start for sample in self.samples)

    def metrics(self) -> dict[str, float]:
        """Counts of samples, turns and prefix breaks, and the position of the first break.
        `wasted_tokens` are repeated as context because of breaks.

        `missing_routes` counts tokens without a row, except a sample's last; `absent_routes` counts
        turns without any. Both are omitted if no rows were requested or sent. `engine_s` is the
        time that all requests of the turns took together.
        """
        broken_at = [sample.broken_at for sample in self.samples if sample.broken_at is not None]
        rows, absent = sum(chunk.rows for chunk in self.chunks()), sum(turn.routes_absent for turn in self.turns)
        return {
            "samples": len(self.samples),
            "turns": len(self.turns),
            "breaks": len(broken_at),
            **({"first_break_position": broken_at[0]} if broken_at else {}),
            "wasted_tokens": sum(broken_at),
            "ambiguous_turns": sum(turn.matches > 1 for turn in self.turns),
            "unknown_logprobs": sum(turn.unknown_logprobs for turn in self.turns),
            "repaired_echoes": self.repaired_echoes,
            "unseen_turns": len(self.unseen),
            **({"engine_s": seconds} if (seconds := sum(turn.seconds for turn in self.turns)) else {}),
            **({"missing_routes": self._expected_rows() - rows, "absent_routes": absent} if rows or absent else {}),
        }

    def _expected_rows(self) -> int:
        expected = 0
        for sample in self.samples:
            chunks = [chunk for turn in (*sample.shared, *sample.turns) for chunk in self.chunks_of[turn]]
            rows_end = chunks[-1].first + chunks[-1].rows if chunks else 0
            expected += max(rows_end, self.turns[sample.turns[-1]].end - 1)
        return expected


def sample_tree(
    samples: Samples,
    parents: Sequence[int] = (),
    *,
    unseen: frozenset[int] = frozenset(),
    repaired_echoes: int = 0,
) -> SampleTree:
    """Build the tree. `parents` has the turn that each turn's messages continue, -1 for none; empty
    if no messages were recorded.

    `parents` and `unseen` number the turns by their commits.
    """
    order = samples.by_arrival()
    place = {turn: position for position, turn in enumerate(order)} | {NO_TURN: NO_TURN}
    tree = SampleTree(
        turns=_named([samples.turns[turn] for turn in order]),
        unseen=frozenset(place[turn] for turn in unseen),
        repaired_echoes=repaired_echoes,
    )
    by_messages = [place[parents[turn]] for turn in order] if parents else [NO_TURN] * len(order)
    rows_before = np.cumsum([0, *(turn.rows for turn in samples.turns)]).tolist()
    continued = _continued(tree, samples, order, by_messages)
    extended, last_of, rows_until = set[int](), dict[str, int](), list[int]()
    for position, (turn, previous) in enumerate(zip(tree.turns, continued, strict=True)):
        _place_rows(tree, turn, previous, rows_until, rows_before[order[position]])
        if previous != NO_TURN and previous not in extended:
            extended.add(previous)
            tree.sample_of.append(tree.sample_of[previous])
            tree.samples[tree.sample_of[previous]].turns.append(position)
        else:
            tree.sample_of.append(len(tree.samples))
            tree.samples.append(
                Sample(
                    turns=[position],
                    shared=_path(previous, continued),
                    parent=_parent(tree, previous, by_messages[position], last_of, turn.agent),
                    agent=turn.agent,
                    broken_at=_broken_at(samples, order, position, last_of.get(turn.agent)),
                )
            )
        last_of[turn.agent] = position
    return tree


def _named(turns: Sequence[TurnDelta]) -> list[TurnDelta]:
    """Name agents that have a random id by their order of arrival."""
    names: dict[str, str] = {}
    for turn in turns:
        if turn.agent.startswith(ID_MARK):
            names.setdefault(turn.agent, f"agent-{len(names) + 1}")
    return [replace(turn, agent=names[turn.agent]) if turn.agent in names else turn for turn in turns]


def _continued(tree: SampleTree, samples: Samples, order: Sequence[int], by_messages: Sequence[int]) -> list[int]:
    """The turn that each turn continues.

    Among turns with equal sequences, one that nothing continues yet is chosen. Of these, the one
    whose answer the request repeats is chosen, else the first to arrive.
    """
    with_sequence: dict[tuple[int, int], list[int]] = {}
    taken, continued = set[int](), list[int]()
    for position, turn in enumerate(tree.turns):
        previous = NO_TURN
        if turn.base != NO_TURN:
            equal = with_sequence[turn.prefix_tokens, samples.digests[turn.base]]
            candidates = [candidate for candidate in equal if candidate not in taken] or equal
            previous = by_messages[position] if by_messages[position] in candidates else candidates[0]
            taken.add(previous)
        continued.append(previous)
        with_sequence.setdefault((turn.end, samples.digests[order[position]]), []).append(position)
    return continued


def _place_rows(tree: SampleTree, turn: TurnDelta, previous: int, rows_until: list[int], row: int) -> None:
    """Place a turn's rows. Later copies do not replace rows of the turn before: weights may have
    changed since."""
    rows_end = rows_until[previous] if previous != NO_TURN else 0
    first_needed = rows_end if rows_end == turn.prefix_tokens else max(0, turn.prefix_tokens - 1)
    chunks: list[Chunk] = []
    for first, rows in turn.chunks:
        skipped = min(rows, max(0, first_needed - first))
        if skipped < rows:
            chunks.append(Chunk(sample=0, first=first + skipped, rows=rows - skipped, row=row + skipped))
        row += rows
    tree.chunks_of.append(chunks)
    rows_until.append(chunks[-1].first + chunks[-1].rows if chunks else rows_end)


def _path(turn: int, continued: Sequence[int]) -> list[int]:
    path: list[int] = []
    while turn != NO_TURN:
        path.append(turn)
        turn = continued[turn]
    return path[::-1]


def _parent(tree: SampleTree, previous: int, by_messages: int, last_of: Mapping[str, int], agent: str) -> int:
    """The sample of the turn that a new sample continues, by its tokens or its messages.

    Otherwise it is the sample that its agent used last. A new agent gets the first agent's last
    one.
    """
    for turn in (previous, by_messages, last_of.get(agent, NO_TURN), next(iter(last_of.values()), NO_TURN)):
        if turn != NO_TURN:
            return tree.sample_of[turn]
    return NO_SAMPLE


def _broken_at(samples: Samples, order: Sequence[int], position: int, previous: int | None) -> int | None:
    if previous is None:
        return None
    turn = samples.turns[order[position]]
    prompt = samples.ids(order[position])[: turn.start]
    recorded = samples.ids(order[previous])[: len(prompt)]
    differs = recorded != prompt[: len(recorded)]
    return int(np.argmax(differs)) if differs.any() else len(recorded)
