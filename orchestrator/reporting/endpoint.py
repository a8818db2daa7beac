"""The orchestrator's HTTP endpoint: `/metrics`, `/status`, `/health`. Read-only; answers from memory, on the loop."""

import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import ip_address
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from headpond.config import Http
from headpond.errors import ConfigError

logger = logging.getLogger("headpond.http")

STOP_S = 1.0  # for requests in progress when the run ends


class Endpoint:
    def __init__(self, status: Callable[[], dict[str, Any]], collector: Collector) -> None:
        """`status` returns the latest one, `collector` the series of `/metrics`."""
        self._latest_status = status
        self._registry = CollectorRegistry()
        self._registry.register(collector)
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
        """The content of status.json, also while that cannot be written."""
        return _json(self._latest_status())

    async def _health(self, _: web.Request) -> web.Response:
        """An answer means that the loop runs. A run that waits for something is healthy: a restart would not help."""
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
        # Errors of name resolution have negative numbers, which `os.strerror` does not know.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(
            f"cannot listen on {settings.host}, port {settings.port}: {why}. "
            'Set http.port to another port, to 0 (any free one) or to "off"; '
            "http.host must be an address of this machine"
        ) from error
    with listener:
        yield listener


def url(listener: socket.socket | None) -> str | None:
    """For clients on other machines: an unspecified address (0.0.0.0, ::) is replaced by the host name."""
    if listener is None:
        return None
    host, port = listener.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def serving(listener: socket.socket | None, endpoint: Endpoint) -> AsyncIterator[None]:
    if listener is None:
        yield
        return
    runner = web.AppRunner(endpoint.app(), access_log=None, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        logger.info("action=http_ready url=%s", url(listener))
        yield
    finally:
        await runner.cleanup()
