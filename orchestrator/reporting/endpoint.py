"""The orchestrator's HTTP endpoint: `/metrics`, `/status`, `/health`. Only shows; on the loop, from what is at hand."""

import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from ipaddress import ip_address
from typing import TYPE_CHECKING

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from orchestrator.reporting.prometheus import RunCollector
from penstock.config import Http
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.loop import Orchestrator

logger = logging.getLogger("penstock.http")

STOP_S = 1.0  # for answers that are under way when the run ends


class Endpoint:
    def __init__(self, orchestrator: "Orchestrator") -> None:
        self._reporter = orchestrator.reporter
        self._registry = CollectorRegistry()
        self._registry.register(RunCollector(orchestrator))
        ProcessCollector(registry=self._registry)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/status", self._status)
        app.router.add_get("/health", self._health)
        return app

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _status(self, _: web.Request) -> web.Response:
        """What status.json says, also while its disk is full."""
        return _json(self._reporter.latest or self._reporter.status())

    async def _health(self, _: web.Request) -> web.Response:
        """Whoever gets this answer knows that the loop runs: what the run waits for is no reason to restart it."""
        return _json({"status": "ok"})


def _json(content: object) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")


@contextlib.contextmanager
def listening(settings: Http) -> Iterator[socket.socket | None]:
    if settings.port == "off":
        yield None
        return
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        why = (
            os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        )  # a name's errors are below 0
        raise ConfigError(
            f"cannot listen on {settings.host}, port {settings.port}: {why}. "
            'Set http.port to another one, to 0 (any that is free) or to "off"; http.host is an address of this machine'
        ) from error
    with listener:
        yield listener


def url(listener: socket.socket | None) -> str | None:
    """Under which others find it: an address that means "all of this machine's" is no place to go to."""
    if listener is None:
        return None
    host, port = listener.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def serving(listener: socket.socket | None, orchestrator: "Orchestrator") -> AsyncIterator[None]:
    if listener is None:
        yield
        return
    runner = web.AppRunner(Endpoint(orchestrator).app(), access_log=None, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        logger.info("action=http_ready url=%s", url(listener))
        yield
    finally:
        await runner.cleanup()
