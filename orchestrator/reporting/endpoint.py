"""The orchestrator's HTTP endpoint: `/metrics`, `/status`, `/health`. Read-only; answers from memory, on the loop."""

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

from headpond.config import Http
from headpond.errors import ConfigError
from headpond.orchestrator.reporting.prometheus import RunCollector

if TYPE_CHECKING:
    from headpond.orchestrator.components import Components

logger = logging.getLogger("headpond.http")

STOP_S = 1.0  # for requests in progress when the run ends


def application(run: "Components") -> web.Application:
    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    ProcessCollector(registry=registry)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def status(_: web.Request) -> web.Response:
        """Answer with the content of status.json, also while that cannot be written."""
        return _json(run.reporter.latest_status().model_dump())

    async def health(_: web.Request) -> web.Response:
        """An answer means that the loop runs. A run that waits for something is healthy: a restart would not help."""
        return _json({"status": "ok"})

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/status", status), web.get("/health", health)])
    return app


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
async def serving(listener: socket.socket | None, run: "Components") -> AsyncIterator[None]:
    if listener is None:
        yield
        return
    runner = web.AppRunner(application(run), access_log=None, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        logger.info("action=http_ready url=%s", url(listener))
        yield
    finally:
        await runner.cleanup()
