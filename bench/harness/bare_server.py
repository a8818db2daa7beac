"""`python -m bench.harness.bare_server SIZE`: a server that only sends SIZE bytes.

The upper limit of what any server reaches on this machine.
"""

import asyncio
import contextlib
import sys

from headpond.event_loop.factory import event_loop_factory


async def serve(size: int) -> None:
    response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (size, bytes(size))

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2]))
                writer.write(response)
                await writer.drain()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    print(f"url=http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201  read by the parent process
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(serve(int(sys.argv[1])))
