"""What a rollout used of each replica, and what replicas that failed it cost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine_clients import attempt_of, loaded, run, stage_of
from support.upstream import ReceivedRequest, Response, answer, prompt_ids, serving, user

from headpond.errors import EngineUnreachable, InfrastructureFailure
from headpond.playing.rollout import play
from headpond.replica_use import REPLICAS_LIMIT, ReplicaUse, Usage

HELLO = "hello"
TOKENS = len(HELLO)
FIRST_TURN = len(prompt_ids([user("first")])) + TOKENS


class Talks:
    """An environment whose rollout is a given function of the policy."""

    def __init__(self, rollout: Callable[[Any], Any]) -> None:
        self._rollout = rollout

    async def rollout(self, example: Any, policy: Any) -> Any:
        return await self._rollout(policy)


async def two_turns(policy: Any) -> float:
    messages = [user("first")]
    messages.append((await policy.chat(messages)).message)
    await policy.chat([*messages, user("second")])
    return 1.0


def hello(request: ReceivedRequest) -> Response:
    return Response(body=answer(request, HELLO))


def failing_at(turn: int, fault: Response) -> Callable[[ReceivedRequest], Response]:
    return lambda request: fault if len(request.messages) == 2 * turn - 1 else hello(request)


def aborting(times: int) -> Callable[[ReceivedRequest], Response]:
    """The first responses to the second turn are aborted."""

    def respond(request: ReceivedRequest) -> Response:
        if len(request.messages) == 1 or request.retry >= times:
            return hello(request)
        body = answer(request, HELLO).replace(b'"finish_reason":"stop"', b'"finish_reason":"abort"')
        assert b'"abort"' in body
        return Response(body=body)

    return respond


def used(result: Any, url: str) -> tuple[int, int]:
    use: ReplicaUse = result.replica_uses.get(url, ReplicaUse())
    return use.tokens, use.lost_tokens


def test_a_replica_that_serves_every_turn_costs_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(hello) as server:
            async with stage_of(tmp_path, server.url) as stage:
                result = await play(stage, loaded(Talks(two_turns)), 0, attempt_of())
        assert used(result, server.url) == (2 * TOKENS, 0)
        assert result.replica_uses[server.url].seconds > 0
        assert "replica_uses" not in result.model_dump(), "the ledger keeps it by replica only"

    run(main)


def test_a_conversation_that_leaves_a_failing_replica_costs_its_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        failing = failing_at(2, Response(status=500, body=b"out of memory"))
        with serving(failing) as first, serving(hello) as second:
            async with stage_of(tmp_path, first.url, second.url) as stage:
                result = await play(stage, loaded(Talks(two_turns)), 0, attempt_of())
        assert used(result, first.url) == (TOKENS, FIRST_TURN)
        assert used(result, second.url) == (TOKENS, 0)

    run(main)


@pytest.mark.parametrize(
    ("fault", "error"),
    [(Response(status=500, body=b"out of memory"), InfrastructureFailure), (None, EngineUnreachable)],
)
def test_a_rollout_that_the_engine_ends_costs_what_it_had_sampled(
    tmp_path: Path, fault: Response | None, error: type[InfrastructureFailure]
) -> None:
    async def main() -> None:
        with serving(failing_at(2, fault or Response(breaks_off_at=-1))) as server:

            async def dies(policy: Any) -> float:
                message = (await policy.chat([user("first")])).message
                if fault is None:
                    server.stop()
                await policy.chat([user("first"), message, user("second")])
                return 1.0

            async with stage_of(tmp_path, server.url, retries=1) as stage:
                with pytest.raises(error) as failure:
                    await play(stage, loaded(Talks(dies)), 0, attempt_of())
        assert used(failure.value, server.url) == (TOKENS, TOKENS)

    run(main)


def test_a_failure_of_the_environment_is_no_cost_of_the_engine(tmp_path: Path) -> None:
    async def breaks(policy: Any) -> float:
        await policy.chat([user("first")])
        raise InfrastructureFailure("the sandbox is gone")

    async def main() -> None:
        with serving(hello) as server:
            async with stage_of(tmp_path, server.url) as stage:
                with pytest.raises(InfrastructureFailure) as failure:
                    await play(stage, loaded(Talks(breaks)), 0, attempt_of())
        assert used(failure.value, server.url) == (TOKENS, 0)

    run(main)


def test_aborted_completions_that_are_asked_for_again_cost_their_tokens(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(aborting(2)) as server:
            async with stage_of(tmp_path, server.url) as stage:
                result = await play(stage, loaded(Talks(two_turns)), 0, attempt_of())
        assert used(result, server.url) == (2 * TOKENS, 2 * TOKENS)

    run(main)


def test_a_reply_names_the_costliest_replicas_first() -> None:
    usage = Usage()
    for number in range(2 * REPLICAS_LIMIT):
        usage.answered(f"http://{number}", tokens=100, seconds=1.0)
    usage.lost("http://5", 7)
    assert len(usage.by_replica) == REPLICAS_LIMIT
    assert next(iter(usage.by_replica)) == "http://5"
