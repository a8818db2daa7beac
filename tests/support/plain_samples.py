"""The reference for samples: the merging rule on plain lists, for turns in the order of their arrival."""

from dataclasses import dataclass, field

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
