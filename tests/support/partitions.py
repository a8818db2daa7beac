"""Networks that can be slow or cut, in one direction or both: TCP links, and a network namespace.

A link needs no privileges. Bytes that are sent while a direction is cut arrive when it is repaired, as TCP's do.
Connections are accepted while the link is cut, and nothing is heard on them. A namespace is joined to this one by a
pair of virtual Ethernet devices. Its frames are lost without a word: the sender's table of neighbours has a wrong
address. The namespace and its devices end with their holder, which ends with this process.
"""

import asyncio
import secrets
import subprocess
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from enum import Flag
from typing import Any

from support.small_disk import held

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16
CHUNKS_HELD = 64  # of one direction of a connection; beyond it, the sender's own buffers fill


class Direction(Flag):
    NONE = 0
    THERE = 1
    BACK = 2
    BOTH = 3


class Link:
    """A port of `host` that forwards to `port`."""

    def __init__(self, links: "Links", port: int, host: str) -> None:
        self._target = port
        self._host = host
        self.delay_s = 0.0
        """of each direction"""
        self._open = {direction: asyncio.Event() for direction in (Direction.THERE, Direction.BACK)}
        self._links = links
        self._tasks = set[asyncio.Task[None]]()
        for each in self._open.values():
            each.set()
        self.port: int = links.run(self._listen())

    def cut(self, directions: Direction) -> None:
        """Cut these directions and repair the others."""

        async def apply() -> None:
            for direction, is_open in self._open.items():
                if direction & directions:
                    is_open.clear()
                else:
                    is_open.set()

        self._links.run(apply())

    async def _listen(self) -> int:
        server = await asyncio.start_server(self._accept, self._host, 0)
        return server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(HOST, self._target)
        except OSError:
            writer.close()
            return
        for pump in (
            self._pump(Direction.THERE, reader, there_writer),
            self._pump(Direction.BACK, there_reader, writer),
        ):
            task = asyncio.create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held = asyncio.Queue[tuple[float, bytes]](CHUNKS_HELD)
        sending = asyncio.create_task(self._send(direction, held, writer))
        content = b"-"
        while content:
            try:
                content = await reader.read(CHUNK_BYTES)
            except OSError:
                content = b""
            await held.put((asyncio.get_running_loop().time() + self.delay_s, content))
        await sending

    async def _send(self, direction: Direction, held: asyncio.Queue[tuple[float, bytes]], writer: Any) -> None:
        """Until the empty chunk that ends the connection. After an error the rest is discarded."""
        failed = False
        while True:
            at, content = await held.get()
            await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
            await self._open[direction].wait()
            if not content:
                break
            try:
                if not failed:
                    writer.write(content)
                    await writer.drain()
            except OSError:
                failed = True
        with suppress(OSError):
            writer.close()
            await writer.wait_closed()


class Links:
    """The loop of the links, in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()

    def to(self, port: int, host: str = HOST) -> Link:
        return Link(self, port, host)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        async def end() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def links() -> Iterator[Links]:
    opened = Links()
    try:
        yield opened
    finally:
        opened.close()


NOWHERE = "02:00:00:00:00:01"
SCRIPT = "echo held && exec sleep infinity"


class NetworkNamespace:
    def __init__(self, holder: int) -> None:
        self.enter = ["nsenter", "--target", str(holder), "--net", "--"]
        first, second = secrets.randbelow(256), 4 * secrets.randbelow(64)
        self._device = f"pk{secrets.token_hex(4)}"
        self.outside, self.inside = (f"10.{first}.77.{second + number}" for number in (1, 2))
        _ip("link", "add", self._device, "type", "veth", "peer", "name", "eth0", "netns", str(holder))
        _ip("addr", "add", f"{self.outside}/30", "dev", self._device)
        _ip("link", "set", self._device, "up")
        self._ip_inside("addr", "add", f"{self.inside}/30", "dev", "eth0")
        for device in ("eth0", "lo"):
            self._ip_inside("link", "set", device, "up")

    def cut(self, directions: Direction) -> None:
        """Cut these directions and repair the others."""
        if Direction.THERE & directions:
            self._ip_inside("neigh", "replace", self.outside, "lladdr", NOWHERE, "nud", "permanent", "dev", "eth0")
        else:
            self._ip_inside("neigh", "flush", "dev", "eth0", "nud", "permanent")
        if Direction.BACK & directions:
            _ip("neigh", "replace", self.inside, "lladdr", NOWHERE, "nud", "permanent", "dev", self._device)
        else:
            _ip("neigh", "flush", "dev", self._device, "nud", "permanent")

    def _ip_inside(self, *arguments: str) -> None:
        subprocess.run([*self.enter, "ip", *arguments], check=True, capture_output=True, text=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def network_namespace() -> Iterator[NetworkNamespace | str]:
    """The namespace; or why there is none: this user may not have one, or `ip` is not installed."""
    holder = held(["unshare", "--net", "sh", "-c", SCRIPT], says=b"held\n")
    if holder is None:
        yield "unshare --net is not permitted"
        return
    try:
        try:
            namespace: NetworkNamespace | str = NetworkNamespace(holder.pid)
        except (OSError, subprocess.CalledProcessError) as error:
            namespace = f"{error}: {getattr(error, 'stderr', '')}"
        yield namespace
    finally:
        holder.kill()
        holder.wait()
