import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support.waiting import wait_until

from penstock import redis_keys
from penstock.runtime.embedded_redis import EmbeddedRedis
from tasks.leases import LeaseKeeper


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


def test_a_held_lease_beats_and_has_an_end(client: redis.Redis, keeper: LeaseKeeper) -> None:
    keeper.take("lease")
    first = wait_until(lambda: client.hget(redis_keys.LEASES, "lease"))
    wait_until(lambda: client.hget(redis_keys.LEASES, "lease") != first)
    assert 0 < client.ttl(redis_keys.LEASES) <= redis_keys.LEASES_TTL_S


def test_a_renewal_that_comes_after_the_end_does_not_bring_a_lease_back(
    client: redis.Redis, keeper: LeaseKeeper
) -> None:
    keeper.take("ended")
    wait_until(lambda: client.hexists(redis_keys.LEASES, "ended"))
    keeper.drop("ended")
    client.hset(redis_keys.LEASES, "ended", "w:1")
    wait_until(lambda: not client.exists(redis_keys.LEASES))


def test_a_process_that_is_not_alive_renews_nothing(client: redis.Redis) -> None:
    asked: list[float] = []
    keeper = LeaseKeeper(client, worker="w", lease_s=0.1, alive=lambda: asked.append(time.monotonic()) is not None)
    keeper.start()
    keeper.take("lease")
    wait_until(lambda: len(asked) >= 3)
    assert not client.exists(redis_keys.LEASES)
    keeper.stop()
