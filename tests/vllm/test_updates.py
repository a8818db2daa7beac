"""Weights, aborts and pauses in the middle of turns: no token is recorded under a version that did not sample it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.alignment import Alignment, Reference, Weights, align
from support.vllm_playing import PLAIN, Played, Table
from support.vllm_server import Release, VllmServer
from support.waiting import wait_until, wait_until_async

LONG = {"max_tokens": 96}
UNENDING = {"ignore_eos": True}
TOKENS = "vllm:generation_tokens_total"


def tokens_at_rest(server: VllmServer) -> float:
    """The tokens that the engine has sampled, once it has counted the last ones of an earlier play: a client has its
    response before."""
    wait_until(lambda: not server.metric("vllm:num_requests_running"))
    return server.metric(TOKENS)


async def generated(server: VllmServer, tokens: int, *, since: float | None = None) -> None:
    """Wait until the engine has sampled this many more tokens than now, or than `since`: a count from before the play,
    if the play may be over before it is counted here."""
    before = await asyncio.to_thread(server.metric, TOKENS) if since is None else since

    async def enough() -> bool:
        return await asyncio.to_thread(server.metric, TOKENS) >= before + tokens

    await wait_until_async(enough)


def updates(server: VllmServer, weights: Weights, versions: tuple[int, ...]) -> Callable[[], Awaitable[None]]:
    async def update() -> None:
        for version in versions:
            await generated(server, 150)
            await asyncio.to_thread(server.load, weights[version], version)

    return update


def aligned_where_exact(played: list[Played], reference: Reference, weights: Weights) -> Alignment:
    samples = [sample for each in played for sample in each.samples]
    found = align(samples, reference, weights)
    assert not found.problems, found.problems[:10]
    return found


@pytest.fixture
def generating(table: Table, tokenizer: str) -> Table:
    renderer = {"model": tokenizer, "chat_template_kwargs": {"enable_thinking": False}}
    table.settings["engine"]["dialect"] = "generate"
    table.settings["policy"] = {"renderer": renderer}
    return table


def test_chats_across_updates(table: Table, reloading: VllmServer, reference: Reference, weights: Weights) -> None:
    meanwhile = updates(reloading, weights, (1, 2, 3))
    # Of 16 turns, some begin after a poll that has seen an update, and end before the next, however fast they are.
    played = table.play(8, turns=16, sampling=LONG, more={**PLAIN, **UNENDING}, meanwhile=meanwhile)
    found = aligned_where_exact(played, reference, weights)
    assert found.left_out > 0, "turns across an update have no exact version"
    assert found.tokens > 0
    assert found.versions & {1, 2, 3}, "weights that were loaded meanwhile"


def test_spans_of_generate_across_updates(
    generating: Table, reloading: VllmServer, reference: Reference, weights: Weights, release: Release
) -> None:
    """vLLM 0.32 names the version of every token: all are exact, those of one turn under several versions too."""
    meanwhile = updates(reloading, weights, (1, 2, 3))
    played = generating.play(8, turns=16, sampling=LONG, more=UNENDING, meanwhile=meanwhile)
    found = aligned_where_exact(played, reference, weights)
    assert (found.left_out == 0) is release.names_tokens
    assert found.versions == {0, 1, 2, 3} or not release.names_tokens


@pytest.mark.parametrize("path", ["/abort_requests", "/pause?mode=abort"])
def test_aborted_chats_are_asked_again(
    table: Table, server: VllmServer, aligned: Callable[..., Alignment], path: str
) -> None:
    async def abort() -> None:
        await generated(server, 30, since=before)
        await asyncio.to_thread(server.post, path, {})
        await asyncio.to_thread(server.post, "/resume")

    before = tokens_at_rest(server)
    played = table.play(4, sampling=LONG, more={**PLAIN, **UNENDING}, meanwhile=abort)
    assert [each.finish_reasons for each in played] == [["length"]] * 4
    assert [len(each.completions[0]) for each in played] == [LONG["max_tokens"]] * 4
    aligned(played)


def test_aborted_completions_of_tokens_are_continued(
    generating: Table, server: VllmServer, aligned: Callable[..., Alignment]
) -> None:
    async def abort() -> None:
        for tokens in (60, 120):
            await generated(server, tokens, since=before)
            await asyncio.to_thread(server.post, "/abort_requests", {})

    before, limit = tokens_at_rest(server), 1000  # seconds of sampling, of which the first abort needs a little
    played = generating.play(4, sampling={"max_tokens": limit}, more=UNENDING, meanwhile=abort)
    assert [len(each.completions[0]) for each in played] == [limit] * 4
    assert server.metric(TOKENS) - before < 4 * limit + 40, "sampled twice"
    assert any(each.result.metrics["engine_aborts"] for each in played), "no abort met a running request"
    aligned(played)


def test_a_thought_that_is_cut_off_is_recorded(table: Table, aligned: Callable[..., Alignment]) -> None:
    text = "Think, then say something."
    played = table.play(4, text=text, sampling={"max_tokens": 6}, more={})
    assert [each.finish_reasons for each in played] == [["length"]] * 4
    assert any(not each.answers[0].get("content") for each in played)
    aligned(played)
