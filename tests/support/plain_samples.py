"""The reference for samples: the merging rule on plain lists, and random rollouts to merge."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

Row = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class PlainTurn:
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    """Routed rows that the engine captured, by token position."""
    agent: str = ""
    seen: bool = True
    parent: int | None = None
    """The turn whose answer the request repeats; of turns with equal sequences it is the one that is extended."""


@dataclass(kw_only=True)
class PlainSample:
    ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    truncated: bool = False
    overlong: bool = False
    first_prompt: int | None = None
    agent: str = ""


@dataclass(frozen=True, kw_only=True)
class _End:
    """A sample as it was after one of its turns."""

    ids: list[int]
    rows: dict[int, Row]
    sample: PlainSample


def merge(turns: list[PlainTurn], *, max_seq_len: int = 10**9, error: bool = False) -> tuple[list[PlainSample], int]:
    """The samples, and how many turns could have extended more than one."""
    samples: list[PlainSample] = []
    ends: list[_End] = []
    taken: set[int] = set()
    ambiguous = 0
    for turn in turns:
        prompt = turn.prompt[:max_seq_len]
        completion = turn.completion[: max(0, max_seq_len - len(turn.prompt))]
        matching = [end for end in ends if prompt[: len(end.ids)] == end.ids]
        ambiguous += len([end for end in matching if id(end) not in taken]) > 1
        longest = max((len(end.ids) for end in matching), default=0)
        equal = [end for end in matching if len(end.ids) == longest]
        free = [end for end in equal if id(end) not in taken]
        repeated = [end for end in free or equal if turn.parent is not None and end is ends[turn.parent]]
        before = next(iter(repeated or free or equal), None)
        if before is not None and free:
            sample = before.sample
        else:
            shared = before.ids if before else []
            sample = PlainSample(
                ids=list(shared),
                mask=[0] * len(shared),
                logprobs=[0.0] * len(shared),
                rows=dict(before.rows) if before else {},
                first_prompt=len(prompt),
                agent=turn.agent,
            )
            samples.append(sample)
        if before is not None:
            taken.add(id(before))
        prefix = len(sample.ids)
        tail = prompt[prefix:]
        trains = 0 if error or not turn.seen else 1
        sample.ids += tail + completion
        sample.mask += [0] * len(tail) + [trains] * len(completion)
        sample.logprobs += [0.0] * len(tail) + turn.logprobs[: len(completion)]
        for position, row in turn.rows.items():
            if max(0, prefix - 1) <= position < len(sample.ids) and position not in sample.rows:
                sample.rows[position] = row
        length = len(turn.prompt) + len(turn.completion)
        sample.truncated |= length > max_seq_len
        sample.overlong |= len(turn.prompt) > max_seq_len
        ends.append(_End(ids=list(sample.ids), rows=dict(sample.rows), sample=sample))
    return samples, ambiguous


SMALL = st.integers(0, 3)


@st.composite
def turn_structures(draw: st.DrawFn, *, exact: bool = False) -> tuple[list[PlainTurn], dict[str, Any]]:
    """Turns, and a limit or none. An `exact` payload ends where an engine's must: at the last token or before it."""
    histories: dict[str, list[list[int]]] = {"a": [[]], "b": [[]]}
    turns: list[PlainTurn] = []
    for number in range(draw(st.integers(0, 7))):
        agent = draw(st.sampled_from("ab"))
        history = draw(st.sampled_from(histories[agent]))
        prompt = history + draw(st.lists(SMALL, min_size=0 if history else 1, max_size=3))
        completion = draw(st.lists(SMALL, max_size=3))
        histories[agent].append(prompt + completion)
        logprobs = [-(number + index / 8) for index in range(len(completion))]
        rows = draw(_payload(len(prompt) + len(completion), number, exact=exact))
        turns.append(PlainTurn(prompt=prompt, completion=completion, logprobs=logprobs, rows=rows, agent=agent))
    limits = {"max_seq_len": draw(st.integers(1, 12))} if draw(st.booleans()) else {}
    return turns, limits


@st.composite
def _payload(draw: st.DrawFn, tokens: int, number: int, *, exact: bool) -> dict[int, list[list[int]]]:
    if not draw(st.integers(0, 3)):
        return {}
    end = draw(st.sampled_from([tokens - 1, tokens - 1, tokens, *([] if exact else [tokens + 2, 1])]))
    start = draw(st.integers(0, max(0, end))) if draw(st.booleans()) else 0
    holes = draw(st.sets(st.integers(start, max(start, end - 2)), max_size=2)) if draw(st.booleans()) else set[int]()
    return {position: [[1 + number * 30 + position, 1]] for position in range(start, end) if position not in holes}
