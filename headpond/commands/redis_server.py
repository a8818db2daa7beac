"""`headpond redis`: the Redis that `headpond up` and the demo start, alone."""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from headpond.commands.output import LOG_FORMAT, Json, print_json

TICK_S = 0.1


def redis(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of its files.")] = Path("runs/redis"),
    host: Annotated[
        str, typer.Option(help="Bind address. Any other than a loopback one requires a password in REDIS_PASSWORD.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 6379,
    as_json: Json = False,
) -> None:
    """Start a Redis with the settings that runs need, until Ctrl-C.

    Keeps its data in DIR: started again, it continues. Its password is REDIS_PASSWORD, if that is set; give it to the
    processes of a run in HEADPOND_REDIS_URL.
    """
    from headpond.commands.interrupts import Interrupts
    from headpond.commands.launcher.broker import PASSWORD
    from headpond.config.redis_address import address
    from headpond.errors import RunError
    from headpond.processes.embedded_redis import EmbeddedRedis

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    interrupts = Interrupts()
    server = EmbeddedRedis(directory, port=port or None, host=host, password=os.environ.get(PASSWORD))
    with server:
        if as_json:
            print_json({"url": address(server.url), "pid": server.pid, "directory": str(directory.resolve())})
            sys.stdout.flush()
        else:
            print(f"redis: {address(server.url)}, process {server.pid}, files in {directory}", flush=True)
        while not interrupts.signals:
            if not server.running:
                raise RunError(f"Redis has ended: its log is {server.log_path}")
            time.sleep(TICK_S)
