"""Random rollouts: interleaved agents that extend, go back and diverge; payloads complete, late, missing or holed."""

from typing import Any

from hypothesis import strategies as st

from support.plain_samples import PlainTurn

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
