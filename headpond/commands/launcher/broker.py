"""The Redis of a run: the configured one, with a free database, or one of its own in the run directory."""

import contextlib
import os
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import redis

from headpond.broker import redis_keys
from headpond.config import RunConfig
from headpond.config.redis_address import address, explain, has_password
from headpond.errors import ConfigError, RunError
from headpond.inspection import run_json
from headpond.inspection.status import open_redis
from headpond.processes.embedded_redis import EmbeddedRedis

PASSWORD = "REDIS_PASSWORD"  # noqa: S105 - the name of a variable, which is that of docker-compose.yml too
DATABASES = 16  # that a Redis has by default


class RunBroker:
    """`start`, then `check` repeatedly, and always `stop`; from the main thread."""

    def __init__(self, settings: RunConfig, *, joined: str | None = None) -> None:
        """`joined`: the address of a run's Redis on another host."""
        self._embedded: EmbeddedRedis | None = None
        self._settings = settings
        self._joined = joined
        self.url = ""
        self.restarts = 0

    def start(self) -> None:
        if self._joined or "redis_url" in self._settings.model_fields_set:
            self.url = _reachable(with_password(self._joined or self._settings.redis_url))
            self.url = self.url if self._joined else with_database(self.url, self._settings.run_dir)
            return
        self._embedded = EmbeddedRedis(self._settings.run_dir / "redis")
        self._embedded.start()
        self.url = self._embedded.url

    def check(self) -> bool:
        """Start a server of our own again that has ended; True if it had."""
        if self._embedded is None or self._embedded.running:
            return False
        self.restarts += 1
        self._embedded.start()
        return True

    def has_orchestrator(self) -> bool:
        """Whether an orchestrator has published its settings lately."""
        with contextlib.suppress(redis.RedisError), open_redis(self.url) as client:
            return bool(client.exists(redis_keys.RUN_SETTINGS))
        return False

    def stop(self) -> None:
        if self._embedded:
            self._embedded.stop()

    def __str__(self) -> str:
        return f"{address(self.url)}{f' (process {self._embedded.pid})' if self._embedded else ''}"


def with_password(url: str) -> str:
    """Add the password of the environment, which no command line shows, if `url` has none."""
    password = os.environ.get(PASSWORD)
    if not password or has_password(url):
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f":{quote(password, safe='')}@{parts.netloc}"))


def with_database(url: str, run_dir: Path) -> str:
    """Add a database, if `url` has none: that of the run, if it has begun, or else the first one that is empty."""
    if urlsplit(url).path.strip("/") or not url.startswith(("redis://", "rediss://")):
        return url
    numbered = [urlunsplit(urlsplit(url)._replace(path=f"/{number}")) for number in range(DATABASES)]
    if (run_dir / "run.json").exists():
        before = run_json.read(run_dir)["redis"]
        if same := [numbered_url for numbered_url in numbered if address(numbered_url) == before]:
            return same[0]
    if empty := next(filter(_is_empty, numbered), None):
        return empty
    raise RunError(
        f"none of the databases 0 to {DATABASES - 1} of Redis at {address(url)} is empty: name one in redis_url, "
        "redis://HOST:PORT/NUMBER, or leave redis_url out for a Redis of the run's own"
    )


def _reachable(url: str) -> str:
    try:
        with open_redis(url) as client:
            client.ping()
    except redis.RedisError as error:
        raise ConfigError(explain(url, error)) from error
    return url


def _is_empty(url: str) -> bool:
    try:
        with open_redis(url) as client:
            return client.dbsize() == 0
    except redis.RedisError:
        return False  # it has fewer databases
