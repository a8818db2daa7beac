"""When the turns, tools and judges of a rollout ran is in its columns."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.engine_clients import attempt_of, loaded, run, stage_of
from support.stores import directory_store
from support.upstream import ReceivedRequest, Response, answer, calling, serving, tool_call, user

from headpond import Tools, graded, tool
from headpond.playing.rollout import play
from headpond.spans import NAME_CHARACTERS, SPANS_MOST, collected, timed
from headpond.store.columns import Columns, read_columns


@tool
def look_up(word: str) -> str:
    """Look up a word."""
    return word


def judge(text: str) -> float:
    return float(len(text))


class Played:
    async def rollout(self, example: Any, policy: Any) -> float:
        tools, messages = Tools(look_up), [user("what is it?")]
        completion = await policy.chat(messages, tools=tools.schemas)
        messages += [completion.message, *await tools.answer(completion)]
        completion = await policy.chat(messages, tools=tools.schemas)
        return await graded(judge, completion.content)


def respond(request: ReceivedRequest) -> Response:
    if len(request.body["messages"]) == 1:
        return Response(body=answer(request, calling(tool_call("look_up", {"word": "it"}))))
    return Response(body=answer(request, "a word"))


def played(root: Path) -> tuple[Columns, dict[str, float]]:
    async def main() -> None:
        with serving(respond) as server:
            async with stage_of(root, server.url) as stage:
                results.append(await play(stage, loaded(Played()), 0, attempt_of()))

    results: list[Any] = []
    run(main)
    return read_columns(directory_store(root), results[0].columns), results[0].metrics


def test_turns_tools_and_judges_are_timed(tmp_path: Path) -> None:
    before = time.time()
    columns, metrics = played(tmp_path)
    turns = columns.turns
    assert turns.begun_at is not None
    assert turns.seconds is not None
    (_, _, began, took), *others = sorted(columns.spans, key=lambda span: span[2])
    assert [span[:2] for span in others] == [["tool", "look_up"], ["grading", "judge"]]
    (_, _, tool_at, tool_s), (_, _, judged_at, judged_s) = others
    parts = [*zip(turns.begun_at.tolist(), turns.seconds.tolist(), strict=True)]
    in_order = [(began, 0.0), parts[0], (tool_at, tool_s), parts[1], (judged_at, judged_s), (began + took, 0.0)]
    for (begin, seconds), (after, _) in pairwise(in_order):
        assert begin + seconds <= after + 0.01, "one after the other"
    assert before - 0.01 <= began <= time.time()
    assert min(turns.seconds) > 0
    assert metrics["engine_s"] == pytest.approx(float(turns.seconds.sum()), abs=0.05)


def test_spans_are_bounded_and_those_of_no_rollout_are_not_kept() -> None:
    with timed("tool", "outside"):
        pass
    with collected() as spans:
        for _ in range(SPANS_MOST + 10):
            with timed("tool", "x" * 1_000):
                pass
    assert len(spans) == SPANS_MOST
    assert {span.name for span in spans} == {"x" * NAME_CHARACTERS}


def test_what_fails_is_timed_too() -> None:
    with collected() as spans, pytest.raises(ValueError, match="no"), timed("tool", "broken"):
        raise ValueError("no")
    assert [span.name for span in spans] == ["broken"]
