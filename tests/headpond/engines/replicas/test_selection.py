import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from headpond.engines.replicas.load import Load
from headpond.engines.replicas.selection import NO_ORDERS, Orders, Replica, Replicas
from headpond.engines.weights import WeightLabel
from headpond.errors import EngineUnreachable
from headpond.turn import SaidVersion


def test_the_least_busy_replica_is_chosen_round_robin_among_equals() -> None:
    replicas = Replicas(["a", "b", "c"])
    assert [replicas.choose().url for _ in range(4)] == ["a", "b", "c", "a"]
    with replicas.choose().busy() as _, replicas.choose().busy() as _:
        busy = {replica.url for replica in replicas.all if replica.in_flight}
        assert replicas.choose().url not in busy
    assert all(replica.in_flight == 0 for replica in replicas.all)


def test_the_preferred_replica_is_chosen_unless_it_is_unreachable_or_failed() -> None:
    replicas = Replicas(["a", "b"])
    preferred = replicas.choose()
    with preferred.busy():
        assert replicas.choose(preferred) is preferred
        assert replicas.choose(preferred, failed=preferred) is not preferred
        preferred.mark_unreachable()
        assert replicas.choose(preferred) is not preferred
        for replica in replicas.all:
            replica.mark_unreachable()
        assert replicas.all_avoided
        assert replicas.choose(preferred).url == "b"


def loaded(**loads: tuple[int, int, float]) -> Replicas:
    """Replicas by name, with running and waiting requests and cache use at the last look."""
    replicas = Replicas(list(loads))
    for replica in replicas.all:
        running, waiting, cache_use = loads[replica.url]
        replica.hear_load(Load(running=running, waiting=waiting, cache_use=cache_use, preemptions=0))
    return replicas


def test_the_replica_that_says_it_is_least_busy_is_chosen() -> None:
    """Its requests are mostly those of other processes."""
    assert loaded(a=(30, 0, 0.2), b=(10, 0, 0.2)).choose().url == "b"
    assert loaded(a=(30, 0, 0.2), b=(20, 8, 0.2)).choose().url == "a", "b has a queue"
    assert loaded(a=(30, 0, 0.2), b=(10, 0, 0.99)).choose().url == "a", "the cache of b is full"


def test_requests_since_the_last_look_count_too() -> None:
    replicas = loaded(a=(4, 0, 0.2), b=(6, 0, 0.2))
    with contextlib.ExitStack() as requests:
        chosen = [requests.enter_context(busy(replicas.choose())).url for _ in range(6)]
    assert sorted(chosen) == ["a"] * 4 + ["b"] * 2
    assert replicas.choose().url == "a"


@contextlib.contextmanager
def busy(replica: Replica) -> Iterator[Replica]:
    with replica.busy():
        yield replica


def test_a_conversation_stays_with_its_replica_while_others_are_less_busy() -> None:
    replicas = loaded(a=(100, 50, 1.0), b=(0, 0, 0.0))
    a = next(replica for replica in replicas.all if replica.url == "a")
    assert replicas.choose(a) is a


def labelled(*labels: str, orders: Orders = NO_ORDERS) -> tuple[Replicas, Replica]:
    """A replica that has given these answers, at times 1, 2, ..."""
    replicas = Replicas(["a"], reported=True)
    for at, label in enumerate(labels, 1):
        replicas.all[0].hear(WeightLabel.parse(label), began=at)
    replicas.follow(orders)
    return replicas, replicas.all[0]


def published(version: int, *, least: int = 0, sequence: int = 1) -> Orders:
    return Orders(run="r1", sequence=sequence, version=version, least_version=least)


def abandoning(version: int, *abandoned: int) -> Orders:
    return Orders(run="r1", sequence=1, version=version, abandoned=abandoned)


def test_orders_of_an_older_job_do_not_lower_the_version() -> None:
    replicas = Replicas(["a", "b"])
    replicas.follow(published(5, sequence=8))
    replicas.follow(published(4, sequence=7))
    assert asyncio.run(replicas.before(replicas.all[0])) == SaidVersion(5, exact=False)
    replicas.follow(published(3, sequence=9))
    assert asyncio.run(replicas.before(replicas.all[0])) == SaidVersion(3, exact=False)
    replicas.follow(Orders(run="r2", sequence=1, version=1))
    assert asyncio.run(replicas.before(replicas.all[0])) == SaidVersion(1, exact=False)


@pytest.mark.parametrize(
    ("labels", "orders", "why"),
    [
        (["7"], published(7, least=7), None),
        (["7@r1"], published(7, least=7), None),
        (["8"], published(7, least=7), None),
        (["default"], published(0), None),
        (["default"], published(1), None),
        (["default"], published(1, least=1), "older than version 1"),
        (["6"], published(7, least=7), "older than version 7"),
        (["6"], published(7, least=6), None),
        (["7", "default"], published(7), "has gone back from version 7 to 'default'"),
        (["7", "default", "7"], published(7), None),
        (["70", "60"], published(60), None),
        (["loading 8@r1"], published(7), "not loaded completely"),
        (["failed 8@r1"], published(8), "not loaded completely"),
        (["7@other"], published(7), "another run"),
        (["70"], abandoning(60, 70), "which the trainer has abandoned"),
        (["61"], abandoning(60, 70), None),
        (["70", "60"], abandoning(60, 70), None),
    ],
)
def test_a_replica_without_the_weights_of_the_run_is_refused(
    labels: list[str], orders: Orders, why: str | None
) -> None:
    replicas, replica = labelled(*labels, orders=orders)
    refusal = replicas.refusal(replica)
    assert (refusal is None) == (why is None)
    assert (why or "") in (refusal or "")


def test_a_replica_that_stops_saying_its_version_is_refused() -> None:
    replicas, replica = labelled("7", orders=published(7, least=7))
    replica.hear(None, began=2.0)
    assert "does not say which weights" in (replicas.refusal(replica) or "")
    unasked = Replicas(["a"], reported=True)
    unasked.follow(published(7, least=7))
    assert unasked.refusal(unasked.all[0]) is None


def test_a_refused_replica_is_the_last_choice() -> None:
    replicas = Replicas(["a", "b"], reported=True)
    a, b = replicas.all
    a.hear(WeightLabel.parse("3"), began=1.0)
    b.hear(WeightLabel.parse("4"), began=1.0)
    replicas.follow(published(4, least=4))
    assert {replicas.choose(a).url for _ in range(3)} == {"b"}
    assert not replicas.all_refused
    b.hear(WeightLabel.parse("default"), began=2.0)
    assert replicas.all_refused


@pytest.mark.parametrize(("answered_at", "version"), [(0.5, 5), (1.5, 5), (2.0, 6), (2.9, 6), (3.0, 7)])
def test_the_first_poll_that_began_after_a_response_counts(answered_at: float, version: int) -> None:
    replicas, _ = labelled("5", "5", "6", "7")
    assert asyncio.run(replicas.after("a", 5, answered_at)) == SaidVersion(version, exact=True)


def test_an_unnumbered_name_is_exact_only_until_a_version_is_published() -> None:
    replicas, _ = labelled("default", "default")
    assert asyncio.run(replicas.after("a", 0, 0.5)) == SaidVersion(0, exact=True)
    replicas.follow(published(1))
    assert asyncio.run(replicas.after("a", 0, 0.5)) == SaidVersion(0, exact=False)


def test_weights_that_are_being_loaded_are_waited_for() -> None:
    replicas, _ = labelled("5", "loading 6@r1", "6@r1")
    assert asyncio.run(replicas.after("a", 5, 1.5)) == SaidVersion(6, exact=True)


@pytest.mark.parametrize("label", ["default", "failed 6@r1", "4"])
def test_a_turn_of_a_replica_that_went_back_cannot_be_trained_on(label: str) -> None:
    replicas, _ = labelled("5", label)
    with pytest.raises(EngineUnreachable, match="while it served the rollout"):
        asyncio.run(replicas.after("a", 5, 1.5))


def test_versions_that_alternate_are_those_of_a_router() -> None:
    replicas, replica = labelled("7", "6", "7", "6", "7", orders=published(7))
    assert replica.router
    assert asyncio.run(replicas.after("a", 7, 1.5)) == SaidVersion(6, exact=False)
    _, updated = labelled("6", "loading 7@r1", "7@r1", "default", "loading 7@r1", "7@r1", "default", "7@r1")
    assert not updated.router


@pytest.mark.parametrize(
    ("started", "router"), [([1.0, 1.0], False), ([1.0, 2.0, 3.0], False), ([1.0, 2.0, 2.0, 1.0], True)]
)
def test_a_process_that_answers_again_after_another_is_behind_a_router(started: list[float], router: bool) -> None:
    """A server that restarts is another process, and the old one does not return."""
    replicas, replica = labelled("7", "7", orders=published(7))
    for at in started:
        replica.hear_load(Load(running=0, waiting=0, cache_use=0.0, preemptions=0, started_at=at))
    assert replica.router is router
    assert asyncio.run(replicas.after("a", 7, 0.5)) == SaidVersion(7, exact=not router)


@pytest.mark.parametrize("fail", [Replica.poll_failed, Replica.mark_unreachable, Replica.doubt])
def test_a_replica_that_failed_is_asked_before_the_next_request(fail: Callable[[Replica], None]) -> None:
    """It may have restarted: what it said before is not the version of the next response."""

    async def main() -> None:
        replicas, replica = labelled("2@r1", orders=published(2))
        assert await replicas.before(replica) == SaidVersion(2, exact=True)
        fail(replica)
        asking = asyncio.create_task(replicas.before(replica))
        while not replica.asked.is_set():
            await asyncio.sleep(0)
        replica.hear(WeightLabel.parse("default"), began=time.monotonic())
        assert (await asking).version == 0
        assert replicas.refusal(replica)

    asyncio.run(main())
