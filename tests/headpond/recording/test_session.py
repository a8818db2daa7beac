import ast
import asyncio
import gc
import inspect
import json
import threading
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conversations import LAYERS, TOPK, chat, prompt_ids, rows_of, started, talk, turn_for, user
from support.stores import directory_store
from support.waiting import wait_until_async

from headpond.errors import (
    BadRequest,
    BlobUnwritten,
    Busy,
    ContextFull,
    Invariant,
    NotFound,
    NothingToTrain,
    PolicyFailure,
)
from headpond.event_loop.factory import event_loop_factory
from headpond.event_loop.offload import in_file_thread
from headpond.fields import FieldValues, TrainerField
from headpond.recording import Mode, Session
from headpond.recording.samples import Samples
from headpond.store.columns import read_columns
from headpond.store.experts import Experts
from headpond.store.files import FileStore


def run(main: Callable[[], Coroutine[Any, Any, None]], *, concurrency: int = 8) -> None:
    with asyncio.Runner(loop_factory=event_loop_factory(concurrency=concurrency)) as runner:
        runner.run(main())


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path)


def files(store: FileStore) -> list[str]:
    return sorted(path.name for path in store.root.rglob("*") if path.is_file())


def test_a_conversation_is_one_sample_with_its_rows(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store, mode=Mode.LINEAR)
        messages = await talk(session, ["hello", "and", "bye"])
        ids = prompt_ids(messages)[:-1]
        assert session.token_ids().tolist() == ids
        assert len(await session.records()) == 3
        reward = FieldValues(declared=(TrainerField(name="reward"),), score={"reward": np.ones(len(ids))})
        sealed = await session.seal(fields=reward)
        assert sealed.sample_lengths == (len(ids),)
        assert (sealed.turns, sealed.truncated, sealed.metrics["samples"]) == (3, False, 1)
        columns = read_columns(store, sealed.columns)
        assert columns.input_ids.tolist() == ids
        assert columns.loss_mask.sum() == sealed.completion_tokens
        assert columns.token_fields["reward"].sum() == len(ids)
        assert json.loads(columns.conversation.tobytes()) == [messages]
        assert sealed.experts
        experts, out = Experts(store, sealed.experts), np.empty((len(ids), LAYERS, TOPK), np.int16)
        experts.read(0, 0, len(ids), out)
        np.testing.assert_array_equal(out[:-1], rows_of(ids))
        assert (out[-1] == -1).all()
        assert experts.routed_valid.tolist() == [1] * (len(ids) - 1) + [0]
        assert files(store) == ["columns.safetensors", "experts.safetensors"]

    run(main)


def test_without_routed_rows_there_is_no_experts_file(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store)
        await chat(session, [user("hello")], routed=False)
        sealed = await session.seal()
        assert sealed.experts is None
        assert files(store) == ["columns.safetensors"]

    run(main)


def test_an_error_masks_the_whole_rollout(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store)
        await talk(session, ["hello"])
        columns = read_columns(store, (await session.seal(error="out of turns")).columns)
        assert columns.error == "out of turns"
        assert not columns.loss_mask.any()

    run(main)


def test_history_is_the_recorded_tokens_and_only_new_rows_are_requested(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store, mode=Mode.LINEAR)
        messages = await talk(session, ["hello", "and"])
        with session.claim() as claim:
            prepared = session.prepare(claim, [*messages, user("bye")])
            assert prepared.history_ids.tolist() == session.token_ids().tolist()
            assert prepared.request.appended == [user("bye")]
            assert prepared.routes_from == len(prepared.history_ids) - 1
            back = session.prepare(claim, [*messages[:2], user("another way")])
            assert back.history_ids.tolist() == prompt_ids(messages[:2])[:-1]
            assert back.routes_from == len(back.history_ids) - 1

    run(main)


def test_going_back_starts_a_new_sample_and_keeps_both(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store, mode=Mode.LINEAR)
        messages = await talk(session, ["hello", "and"])
        other = await talk(session, ["another way"], after=messages[:2])
        longer = await talk(session, ["on we go"], after=other)
        with pytest.raises(BadRequest, match="at most one"):
            await talk(session, ["a third way"], after=messages[:2])
        assert session.turns == 4
        assert session.token_ids().tolist() == prompt_ids(longer)[:-1]
        assert len(await session.records()) == 3
        columns = read_columns(store, (await session.seal()).columns)
        assert columns.sample_offsets.tolist() == [0, len(prompt_ids(messages)) - 1, columns.input_ids.size]
        assert columns.metrics["breaks"] == 1
        assert json.loads(columns.conversation.tobytes()) == [messages, longer]

    run(main)


def test_agents_may_interleave_in_mode_open(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store)
        first = await talk(session, ["hello"])
        other = [user("a sub-agent's task")]
        await chat(session, other, agent="sub")
        first = await talk(session, ["and"], after=first)
        sealed = await session.seal()
        assert sealed.sample_lengths == (len(prompt_ids(first)) - 1, sealed.sample_lengths[1])
        assert len(sealed.sample_lengths) == 2
        assert sealed.metrics["breaks"] == 0

    run(main)


@pytest.mark.parametrize("mode", Mode)
def test_a_truncated_turn_cannot_be_continued(store: FileStore, mode: Mode) -> None:
    async def main() -> None:
        session = await started(store, mode=mode, max_seq_len=12)
        messages = await talk(session, ["hello"])
        with pytest.raises(ContextFull, match=r"reached policy\.max_seq_len \(12\)"):
            await chat(session, [*messages, user("and")])
        await chat(session, [user("hello")])
        assert (await session.seal()).sample_lengths == (12, 12)

    run(main)


def test_token_in_token_out_records_no_messages(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store)
        messages = [user("1")]
        for _ in range(2):
            with session.claim() as claim:
                prepared = session.prepare(claim)
                assert await session.commit(claim, prepared, turn_for(prepared, messages))
            messages += [{"role": "assistant", "content": "?"}, user("2")]
        sealed = await session.seal()
        assert sealed.turns == 2

    run(main)


def test_a_truncated_conversation_ends(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store, mode=Mode.LINEAR, max_seq_len=8)
        messages = await talk(session, ["hello"])
        with pytest.raises(BadRequest, match=r"max_seq_len \(8\)"):
            await talk(session, ["and"], after=messages)
        sealed = await session.seal()
        assert sealed.sample_lengths == (8,)
        assert sealed.truncated

    run(main)


def test_too_many_samples_are_the_policys_failure(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store, max_samples=1)
        await talk(session, ["hello"])
        with pytest.raises(PolicyFailure, match="1 samples"):
            await talk(session, ["something else"])
        assert (await session.seal()).turns == 1

    run(main)


def test_one_chat_at_a_time(store: FileStore) -> None:
    async def main() -> None:
        session, won, inside = await started(store), list[int](), asyncio.Event()

        async def one(number: int) -> None:
            with session.claim():
                won.append(number)
                await inside.wait()

        tasks = [asyncio.create_task(one(number)) for number in range(20)]
        await wait_until_async(lambda: sum(task.done() for task in tasks) == 19)
        inside.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(won) == 1
        refused = [error for error in results if error]
        assert all(isinstance(error, Busy) for error in refused)
        assert "in-flight" in str(refused[0])
        await talk(session, ["the claim is released"])

    run(main)


def test_a_closed_session_is_not_found_even_while_claimed(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store)
        with session.claim() as claim:
            await session.close()
            for refused in (session.claim().__enter__, lambda: session.prepare(claim, [user("x")])):
                with pytest.raises(NotFound, match=r"^session not found: session_id=s1$"):
                    refused()
            with pytest.raises(NotFound):
                await session.seal()
            with pytest.raises(NotFound):
                await session.close()
        assert files(store) == []

    run(main)


def test_a_turn_of_a_session_closed_meanwhile_is_not_recorded(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store)
        with session.claim() as claim:
            prepared = session.prepare(claim, [user("hello")])
            await session.close()
            assert not await session.commit(claim, prepared, turn_for(prepared, [user("hello")]))
        assert session.turns == 0
        assert files(store) == []

    run(main)


def test_a_closed_session_has_nothing_to_save(store: FileStore) -> None:
    """Else a session server that deletes a session right after an answer tries again for ever, and does not end."""

    async def main() -> None:
        session, messages = await started(store), [user("hello")]
        with session.claim() as claim:
            prepared = session.prepare(claim, messages)
            assert await session.commit(claim, prepared, turn_for(prepared, messages), seen=False)
        assert claim.turn is not None
        session.see(claim.turn)
        assert session.has_unsaved
        await session.close()
        await session.save_seen()
        assert not session.has_unsaved

    run(main)


async def ticks(count: int = 10) -> None:
    """Enough iterations of the loop for everything that can run to run."""
    for _ in range(count):
        await asyncio.sleep(0)


class BlockedPool:
    """Both file threads are blocked: a write has started but cannot finish."""

    def __init__(self) -> None:
        self.release = threading.Event()

    async def __aenter__(self) -> "BlockedPool":
        self.tasks = [asyncio.create_task(in_file_thread(self.release.wait)) for _ in range(2)]
        await ticks()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release.set()
        await asyncio.gather(*self.tasks)


def test_closing_while_a_turn_is_written_removes_it(store: FileStore) -> None:
    async def main() -> None:
        session, recorded = await started(store), list[bool]()

        async def one() -> None:
            with session.claim() as claim:
                prepared = session.prepare(claim, [user("hello")])
                recorded.append(await session.commit(claim, prepared, turn_for(prepared, [user("hello")])))

        async with BlockedPool() as pool:
            chatting = asyncio.create_task(one())
            await ticks()
            closing = asyncio.create_task(session.close())
            await ticks()
            assert not closing.done()
            pool.release.set()
            await asyncio.gather(chatting, closing)
        assert recorded == [False]
        assert files(store) == []

    run(main, concurrency=1)


@pytest.mark.parametrize("cancels", [1, 3])
def test_a_cancelled_commit_completes_before_the_claim_is_released(store: FileStore, cancels: int) -> None:
    async def main() -> None:
        session = await started(store)
        async with BlockedPool() as pool:
            chatting = asyncio.create_task(chat(session, [user("hello")]))
            await ticks()
            for _ in range(cancels):
                chatting.cancel()
                await ticks()
                with pytest.raises(Busy):
                    session.claim().__enter__()
            pool.release.set()
            with pytest.raises(asyncio.CancelledError):
                await chatting
        assert session.turns == 1
        await talk(session, ["the claim is released"])

    run(main, concurrency=1)


def test_after_a_cancellation_memory_and_disk_agree(store: FileStore) -> None:
    async def main() -> None:
        session, messages, finished = await started(store), list[dict[str, Any]](), 0
        for count in range(40):
            chatting = asyncio.create_task(chat(session, [*messages, user(f"{count}")]))
            await ticks(count % 13)
            chatting.cancel()
            results = await asyncio.gather(chatting, return_exceptions=True)
            finished += isinstance(results[0], str)
        assert finished <= session.turns
        again = await Session.recover(store, session.settings.key)
        assert again.turns == session.turns
        assert await again.records() == await session.records()
        assert again.token_ids().tolist() == session.token_ids().tolist()
        await talk(session, ["the claim is released"])

    run(main)


def test_cancellation_and_errors_release_the_claim_and_commit_nothing(store: FileStore) -> None:
    async def main() -> None:
        session, never = await started(store), asyncio.Event()

        async def cancelled_while_sending() -> None:
            with session.claim() as claim:
                session.prepare(claim, [user("hello")])
                await never.wait()

        async def failed() -> None:
            with session.claim() as claim:
                session.prepare(claim, "no messages")

        sending = asyncio.create_task(cancelled_while_sending())
        await asyncio.sleep(0)
        sending.cancel()
        results = await asyncio.gather(sending, failed(), return_exceptions=True)
        assert [type(error) for error in results] == [asyncio.CancelledError, BadRequest]
        assert session.turns == 0
        await talk(session, ["the claim is released"])

    run(main)


def test_a_stale_claim_is_refused(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store)
        with session.claim() as old:
            stale = session.prepare(old, [user("hello")])
        await talk(session, ["hello"])
        with session.claim() as claim:
            with pytest.raises(Invariant, match="does not hold its claim"):
                session.prepare(old, [user("hello")])
            with pytest.raises(Invariant, match="does not hold its claim"):
                await session.commit(old, stale, turn_for(stale, [user("hello")]))
            assert session.prepare(claim, [user("hello")]).arrival == 1
        assert session.turns == 1

    run(main)


def test_a_failed_write_keeps_the_earlier_turns(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store)
        messages = await talk(session, ["hello"])
        log = next(store.root.rglob(".columns*"))
        log.rename(log.with_name("elsewhere"))
        with pytest.raises(BlobUnwritten, match="cannot write"):
            await talk(session, ["and"], after=messages)
        assert session.turns == 1
        log.with_name("elsewhere").rename(log)
        messages = await talk(session, ["and"], after=messages)
        sealed = await session.seal()
        assert sealed.experts
        ids = read_columns(store, sealed.columns).input_ids
        out = np.empty((len(ids), LAYERS, TOPK), np.uint8)
        Experts(store, sealed.experts).read(0, 0, len(ids), out, missing=0)
        np.testing.assert_array_equal(out[:-1], rows_of(ids.tolist()))

    run(main)


def test_a_failed_seal_can_be_retried(store: FileStore) -> None:
    async def main() -> None:
        for obstacle in ("columns.safetensors", "experts.safetensors"):
            session = await started(store, key=obstacle.partition(".")[0])
            messages = await talk(session, ["hello"])
            blocked = store.root / session.settings.key / obstacle
            blocked.mkdir()
            with pytest.raises(BlobUnwritten):
                await session.seal()
            await talk(session, ["still open"], after=messages)
            blocked.rmdir()
            sealed = await session.seal()
            assert sealed.turns == 2
            assert sealed.experts
            assert len(Experts(store, sealed.experts).rows) == sealed.sample_lengths[0] - 1

    run(main)


def test_sealing_twice_returns_the_same_result(store: FileStore) -> None:
    async def main() -> None:
        session = await started(store)
        with pytest.raises(NothingToTrain, match="recorded no turn"):
            await session.seal()
        await talk(session, ["hello"])
        with session.claim(), pytest.raises(Busy):
            await session.seal()
        first, second = await asyncio.gather(session.seal(), session.seal())
        assert first is second
        with pytest.raises(NotFound):
            session.claim().__enter__()
        await session.close()
        assert read_columns(store, first.columns).rollout == "r1"

    run(main)


def test_an_idle_session_costs_its_columns(store: FileStore) -> None:
    async def main() -> None:
        texts = [letter * 600 for letter in "abcdefghij"]
        await talk(await started(store, key="imports"), texts)
        gc.collect()
        tracemalloc.start()
        session = await started(store)
        await talk(session, texts)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        columns = read_columns(store, (await session.seal()).columns)
        recorded = columns.input_ids.nbytes + columns.loss_mask.nbytes + columns.logprobs.nbytes
        assert used < 1.2 * recorded

    run(main)


def test_state_changes_do_not_span_an_await() -> None:
    tree = ast.parse(inspect.getsource(inspect.getmodule(Session)))  # type: ignore[arg-type]
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert all(isinstance(functions[name], ast.FunctionDef) for name in ("claim", "prepare"))
    assert not inspect.iscoroutinefunction(Samples.history)
    locked = [
        name
        for name, function in functions.items()
        if any(isinstance(node, ast.AsyncWith) for node in ast.walk(function))
    ]
    assert locked == [
        "leave_out",
        "_record",
        "_save_seen",
    ]  # the lock of commits: nothing but the log's file is awaited in it
    record = list(ast.walk(functions["_record"]))
    awaited = [ast.unparse(node.value) for node in record if isinstance(node, ast.Await)]
    assert awaited == ["in_file_thread(self._spool.write, entry, rows)"]
    last_await = max(node.lineno for node in record if isinstance(node, ast.Await))
    calls = {
        node.func.attr: node.lineno for node in record if isinstance(node, ast.Call) and hasattr(node.func, "attr")
    }
    assert all(calls[name] > last_await for name in ("_is_closed", "add", "commit"))
