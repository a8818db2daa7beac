"""The reference for samples: the merging rule on plain lists."""

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


@dataclass(kw_only=True)
class PlainSample:
    ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    truncated: bool = False
    overlong: bool = False
    first_prompt: int | None = None


def merge(turns: list[PlainTurn], *, max_seq_len: int = 10**9, error: bool = False) -> tuple[list[PlainSample], int]:
    """The samples, and how many turns could have extended more than one."""
    samples: list[PlainSample] = []
    ambiguous = 0
    for turn in turns:
        prompt = turn.prompt[:max_seq_len]
        completion = turn.completion[: max(0, max_seq_len - len(turn.prompt))]
        candidates = [sample for sample in samples if prompt[: len(sample.ids)] == sample.ids]
        ambiguous += len(candidates) > 1
        if candidates:
            sample = max(candidates, key=lambda candidate: len(candidate.ids))
        else:
            sample = PlainSample(first_prompt=len(prompt))
            samples.append(sample)
        prefix = len(sample.ids)
        tail = prompt[prefix:]
        sample.ids += tail + completion
        sample.mask += [0] * len(tail) + [0 if error else 1] * len(completion)
        sample.logprobs += [0.0] * len(tail) + turn.logprobs[: len(completion)]
        for position, row in turn.rows.items():
            if max(0, prefix - 1) <= position < len(sample.ids) and position not in sample.rows:
                sample.rows[position] = row
        length = len(turn.prompt) + len(turn.completion)
        sample.truncated |= length > max_seq_len
        sample.overlong |= len(turn.prompt) > max_seq_len
    return samples, ambiguous
