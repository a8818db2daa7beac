"""Which workers are quarantined, by the outcomes of their jobs."""

from hypothesis import given
from hypothesis import strategies as st

from headpond.orchestrator.workforce.quarantine import (
    LEAST_FAILURES,
    PAUSE_FIRST_S,
    PAUSE_MOST_S,
    WINDOW,
    Peer,
    Quarantine,
    Standing,
)

KIND = "rollouts"


def peers(*nodes: str, running: int = 1, kind: str = KIND) -> list[Peer]:
    return [Peer(node=node, kind=kind, running=running) for node in nodes]


def fail(quarantine: Quarantine, node: str, times: int = LEAST_FAILURES) -> None:
    for _ in range(times):
        quarantine.failed(node, "no store", 0.0)


def test_a_worker_whose_jobs_fail_while_others_succeed_is_quarantined() -> None:
    quarantine = Quarantine()
    fail(quarantine, "bad")
    quarantine.succeeded("good")
    assert quarantine.review(peers("bad", "good", running=0), 0.0) == ["bad"]
    assert [(node, health.error) for node, health in quarantine.excluded()] == [("bad", "no store")]


def test_a_worker_that_runs_its_first_jobs_without_a_failure_is_better_than_one_that_fails() -> None:
    quarantine = Quarantine()
    fail(quarantine, "bad")
    assert quarantine.review(peers("bad", "idle", running=0), 0.0) == []
    assert quarantine.review(peers("bad", "busy", running=1), 0.0) == ["bad"]


def test_workers_that_fail_alike_stay() -> None:
    quarantine = Quarantine()
    for node in ("one", "two"):
        fail(quarantine, node)
    assert quarantine.review(peers("one", "two"), 0.0) == []


def test_a_job_that_fails_everywhere_now_and_then_excludes_no_worker() -> None:
    quarantine = Quarantine()
    for _ in range(WINDOW):
        for node in ("one", "two"):
            fail(quarantine, node, 1)
            quarantine.succeeded(node)
            quarantine.succeeded(node)
    assert quarantine.review(peers("one", "two"), 0.0) == []


def test_workers_of_another_kind_are_not_compared() -> None:
    quarantine = Quarantine()
    fail(quarantine, "bad")
    quarantine.succeeded("good")
    assert quarantine.review([*peers("bad"), *peers("good", kind="compute")], 0.0) == []


def test_a_trial_of_one_job_decides_and_the_pause_doubles() -> None:
    quarantine, now, pauses = Quarantine(), 0.0, list[float]()
    both = peers("bad", "good")
    fail(quarantine, "bad")
    quarantine.review(both, now)
    for _ in range(9):
        ((_, health),) = quarantine.excluded()
        pauses.append(health.pause_s)
        quarantine.review(both, health.until - 0.1)
        assert quarantine.standing("bad") is Standing.QUARANTINED
        now = health.until
        quarantine.review(both, now)
        assert quarantine.standing("bad") is Standing.TRIAL
        quarantine.failed("bad", "still no store", now)
        assert quarantine.standing("bad") is Standing.QUARANTINED
    assert pauses[:3] == [PAUSE_FIRST_S, 2 * PAUSE_FIRST_S, 4 * PAUSE_FIRST_S]
    assert pauses[-1] == PAUSE_MOST_S
    quarantine.review(both, now + PAUSE_MOST_S)
    quarantine.succeeded("bad")
    assert quarantine.standing("bad") is Standing.ADMITTED


def test_a_worker_that_becomes_the_last_one_is_let_in() -> None:
    quarantine = Quarantine()
    fail(quarantine, "bad")
    quarantine.review(peers("bad", "good"), 0.0)
    quarantine.review(peers("bad"), 1.0)
    assert quarantine.standing("bad") is Standing.ADMITTED


NODES = ["a", "b", "c"]
happening = st.one_of(
    st.tuples(st.just("done"), st.sampled_from(NODES)),
    st.tuples(st.just("failed"), st.sampled_from(NODES)),
    st.tuples(st.just("review"), st.sets(st.sampled_from(NODES), min_size=1)),
)


@given(st.lists(happening, max_size=120), st.integers(min_value=0, max_value=2))
def test_one_worker_is_always_admitted_and_an_excluded_one_is_tried_again(
    happenings: list[tuple[str, str | set[str]]], running: int
) -> None:
    quarantine, now = Quarantine(), 0.0
    for what, whom in happenings:
        now += 1.0
        if what == "review":
            there = peers(*sorted(whom), running=running)
            quarantine.review(there, now)
            assert any(quarantine.standing(peer.node) is Standing.ADMITTED for peer in there)
        elif what == "done":
            quarantine.succeeded(str(whom))
        else:
            quarantine.failed(str(whom), "no store", now)
    quarantine.review(peers(*NODES, running=running), now)
    quarantine.review(peers(*NODES, running=running), now + PAUSE_MOST_S)
    assert Standing.QUARANTINED not in {quarantine.standing(node) for node in NODES}


@given(st.lists(st.booleans(), max_size=3 * WINDOW))
def test_a_worker_without_failures_is_never_excluded(outcomes_of_other: list[bool]) -> None:
    quarantine = Quarantine()
    for succeeded in outcomes_of_other:
        quarantine.succeeded("good")
        quarantine.succeeded("other") if succeeded else quarantine.failed("other", "x", 0.0)
        assert "good" not in quarantine.review(peers("good", "other"), 0.0)
