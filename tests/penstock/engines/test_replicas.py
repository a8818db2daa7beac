from penstock.engines.replicas import Replicas


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


def test_a_version_is_announced_for_one_replica_or_all() -> None:
    replicas = Replicas(["a", "b"])
    replicas.announce(3)
    replicas.announce(4, url="b")
    assert {replica.url: replica.version for replica in replicas.all} == {"a": 3, "b": 4}
    replicas.announce(2)
    assert {replica.version for replica in replicas.all} == {2}
