import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support.waiting import wait_until

from headpond.broker import redis_keys
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.tasks.leases import LeaseKeeper


@pytest.fixture
def client(tmp_path: Path) -> Iterator[redis.Redis]:
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def keeper(client: redis.Redis) -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(client, worker="w", lease_s=0.1)
    keeper.start()
    yield keeper
    keeper.stop()


def test_a_held_lease_is_renewed_and_its_key_expires(client: redis.Redis, keeper: LeaseKeeper) -> None:
    keeper.hold("lease")
    first = wait_until(lambda: client.hget(redis_keys.LEASES, "lease"))
    wait_until(lambda: client.hget(redis_keys.LEASES, "lease") != first)
    assert 0 < client.ttl(redis_keys.LEASES) <= redis_keys.LEASES_TTL_S


def test_a_renewal_names_the_replica_that_is_asked(client: redis.Redis, keeper: LeaseKeeper) -> None:
    asked: list[str] = []
    assert "@" not in keeper.hold("lease", asked)
    asked += ["http://first:8000", "http://second:8000"]
    wait_until(lambda: (client.hget(redis_keys.LEASES, "lease") or b"").endswith(b"@http://second:8000"))
    asked.clear()
    wait_until(lambda: b"@" not in (client.hget(redis_keys.LEASES, "lease") or b"@"))


def test_a_late_renewal_does_not_restore_an_ended_lease(client: redis.Redis, keeper: LeaseKeeper) -> None:
    keeper.hold("ended")
    wait_until(lambda: client.hexists(redis_keys.LEASES, "ended"))
    keeper.drop("ended")
    client.hset(redis_keys.LEASES, "ended", "w:1")
    wait_until(lambda: not client.exists(redis_keys.LEASES))


def test_a_lease_that_the_last_renewal_restored_is_removed_at_the_stop(client: redis.Redis) -> None:
    keeper = LeaseKeeper(client, worker="w", lease_s=0.1)
    keeper.start()
    keeper.hold("ended")
    wait_until(lambda: client.hexists(redis_keys.LEASES, "ended"))
    keeper.hold("abandoned")
    wait_until(lambda: client.hexists(redis_keys.LEASES, "abandoned"))
    keeper.drop("ended")
    keeper.stop()
    assert client.hkeys(redis_keys.LEASES) == [b"abandoned"]


def test_the_leases_of_a_run_that_has_ended_are_reported(client: redis.Redis) -> None:
    told: list[list[str]] = []
    keeper = LeaseKeeper(client, worker="w", lease_s=0.1, run_ended=lambda leases: told.append(sorted(leases)))
    keeper.start()
    for lease in ("run.g0000000-0.1.abc", "run.g0000000-1.1.abc", "other.g0000000-0.1.abc"):
        keeper.hold(lease)
    wait_until(lambda: client.hlen(redis_keys.LEASES) == 3)
    assert told == []
    client.set(redis_keys.ENDED, "run")
    wait_until(lambda: told)
    keeper.stop()
    assert told[0] == ["run.g0000000-0.1.abc", "run.g0000000-1.1.abc"]


def test_a_blocked_process_renews_nothing(client: redis.Redis) -> None:
    checks: list[float] = []
    keeper = LeaseKeeper(client, worker="w", lease_s=0.1, alive=lambda: checks.append(time.monotonic()) is not None)
    keeper.start()
    keeper.hold("lease")
    wait_until(lambda: len(checks) >= 3)
    assert not client.exists(redis_keys.LEASES)
    keeper.stop()
