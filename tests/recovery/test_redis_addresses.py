"""Every process reaches Redis by every address that the configuration accepts: TLS, unix socket, users of an ACL."""

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
import redis.asyncio
from celery import Celery
from kombu.exceptions import OperationalError
from support.cluster import cluster_in
from support.redis_proxy import HOST, Authority, tls_port, unix_socket

from headpond.config import RunConfig
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.tasks.celery_app import broker_settings

USER, PASSWORD = "ada@home", "hunter2/#?@%: "
LOGIN = f"{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@"


def add_user(client: redis.Redis) -> None:
    """All of a run's commands, and no other user: the default one is off."""
    client.acl_setuser(USER, enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"], channels=["*"], categories=["+@all"])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "trusted")


class Addresses:
    def __init__(self, plain: int, tls: int, path: Path, authority: Authority) -> None:
        self.plain = f"redis://{LOGIN}{HOST}:{plain}/3"
        self.tls = f"rediss://{LOGIN}{HOST}:{tls}/3?ssl_ca_certs={authority.ca}"
        self.tls_without_ca = f"rediss://{LOGIN}{HOST}:{tls}/3"
        self.tls_other_name = f"rediss://{LOGIN}localhost:{tls}/3?ssl_ca_certs={authority.ca}"
        self.tls_unverified = f"rediss://{LOGIN}{HOST}:{tls}/3?ssl_cert_reqs=none&ssl_check_hostname=false"
        self.unix = f"unix://{LOGIN}{path}?db=3"
        self.celery_unix = f"redis+socket://{LOGIN}{path}?virtual_host=3"


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Addresses]:
    directory = tmp_path_factory.mktemp("redis")
    with (
        EmbeddedRedis(directory, appendonly=False) as server,
        redis.Redis.from_url(server.url) as client,
        tls_port(server.port, authority) as tls,
        unix_socket(server.port, directory / "redis.sock") as path,
    ):
        add_user(client)
        yield Addresses(server.port, tls, path, authority)


def set_by_each_client(url: str) -> list[str]:
    """The values that three clients set in database 3: redis-py, its asyncio client and Celery's transport."""
    url = RunConfig.model_validate({"redis_url": url}).redis_url

    async def set_by_asyncio() -> None:
        async with redis.asyncio.Redis.from_url(url) as client:
            await client.rpush("seen", "asyncio")

    with redis.Redis.from_url(url) as client:
        client.rpush("seen", "sync")
        asyncio.run(set_by_asyncio())
        app = Celery("test")
        app.conf.update(broker_settings(url))
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
            connection.default_channel.client.rpush("seen", "celery")
        seen = [value.decode() for value in client.lrange("seen", 0, -1)]  # type: ignore[union-attr]
        client.delete("seen")
    return seen


@pytest.mark.parametrize("name", ["plain", "tls", "tls_unverified", "unix", "celery_unix"])
def test_redis_and_celery_clients_use_the_same_address(addresses: Addresses, name: str) -> None:
    assert set_by_each_client(getattr(addresses, name)) == ["sync", "asyncio", "celery"]


@pytest.mark.parametrize("name", ["tls_without_ca", "tls_other_name"])
def test_no_client_accepts_a_certificate_that_it_cannot_verify(addresses: Addresses, name: str) -> None:
    url = getattr(addresses, name)
    with redis.Redis.from_url(url) as client, pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        client.ping()

    async def ping() -> None:
        async with redis.asyncio.Redis.from_url(url) as client:
            await client.ping()

    with pytest.raises((redis.ConnectionError, ssl.SSLCertVerificationError)):
        asyncio.run(ping())
    app = Celery("test")
    app.conf.update(broker_settings(url))
    with app.connection_for_write() as connection, pytest.raises(OperationalError, match="CERTIFICATE_VERIFY_FAILED"):
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)


def test_a_run_uses_tls_and_a_unix_socket_as_a_user_of_an_acl(tmp_path: Path, authority: Authority) -> None:
    with cluster_in(tmp_path) as cluster:
        port = cluster.redis_server.port
        add_user(cluster.redis)
        with tls_port(port, authority) as tls, unix_socket(port, tmp_path / "redis.sock") as path:
            ways = Addresses(port, tls, path, authority)
            url = "HEADPOND_REDIS_URL"
            rollouts = cluster.rollout_worker(**{url: ways.unix.replace("db=3", "db=0")})
            compute = cluster.compute_worker(**{url: ways.tls.replace("/3?", "/0?")})
            run = cluster.orchestrator(**{url: ways.celery_unix.replace("virtual_host=3", "virtual_host=0")})
            cluster.finish(run)
            for process in (rollouts, compute, run):
                assert "hunter2" not in process.text
