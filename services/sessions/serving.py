"""The process: bind, take the sessions that an earlier one left, serve until told to stop, let chats end."""

import asyncio
import gc
import logging
import signal
import socket

from aiohttp import web

from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.runtime.event_loop import event_loop_factory
from penstock.runtime.offload import in_io_thread
from penstock.store import Store
from services.sessions.backend import Backend
from services.sessions.connection import JsonServer
from services.sessions.server import SessionServer
from services.sessions.session_table import Registry
from services.sessions.shelf import Shelf, owner_of

logger = logging.getLogger("penstock.sessions")

CONCURRENCY = 32
"""Sessions whose files are written at once, twice: each write takes a millisecond or two."""


def serve(config: RunConfig) -> None:
    """Until SIGINT or SIGTERM."""
    factory = event_loop_factory(concurrency=CONCURRENCY, cpu_threads=config.sessions.cpu_workers)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(config))


async def _serve(config: RunConfig) -> None:
    stopping = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    listening = _bound(config.sessions.host, config.sessions.port)
    shelf = Shelf(Store(config.store_dir), owner_of(config.sessions.instance_id, listening.getsockname()[1]))
    await in_io_thread(shelf.take)
    registry = Registry(shelf, config, await in_io_thread(shelf.left_behind))
    lag = config.lag.watch("sessions")
    async with Backend.open(config.engine) as backend:
        server = SessionServer(config, registry, backend, lag)
        await server.warm_up()
        runner = web.ServerRunner(_http(server, config), shutdown_timeout=config.sessions.drain_s)
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(lag.run()), group.create_task(registry.watch())]
            try:
                gc.freeze()  # what start-up made stays: collections need not look at it
                await _listen(runner, listening, server, config)
                await stopping.wait()
            finally:
                await runner.cleanup()
                for task in watching:
                    task.cancel()
                await registry.finish()


def _http(server: SessionServer, config: RunConfig) -> JsonServer:
    line = config.sessions.header_bytes
    return JsonServer(server.handle, access_log=None, max_line_size=line, max_field_size=line)


async def _listen(runner: web.ServerRunner, listening: socket.socket, server: SessionServer, config: RunConfig) -> None:
    await runner.setup()
    await web.SockSite(runner, listening, backlog=1024).start()
    host, port = listening.getsockname()[:2]
    logger.info(
        "action=sessions_ready url=http://%s:%d instance=%s engine=%s left_behind=%d secrets=%s",
        f"[{host}]" if ":" in host else host,
        port,
        server.instance_id,
        ",".join(config.engine.urls),
        len(server.registry),
        "required" if config.sessions.needs_secret else "not required",
    )


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0: any)"
        ) from error
