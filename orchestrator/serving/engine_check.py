"""The check of an engine that was away or busy when the run started: made as soon as it answers, before the first
rollout.

The check itself runs in a child process, `python -m headpond.doctor`: it plays with the run's dialect, which may be
code of the user.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import orjson
from yarl import URL

from headpond.config import RunConfig
from headpond.errors import RunError
from headpond.orchestrator.duties.housekeeping import Troubles

logger = logging.getLogger("headpond.engine_check")

CHILD_S = 120.0  # of the child, which limits its own questions: its start takes 20 s at a load of 20
LISTEN_S = 1.0  # between two attempts to connect
CONNECT_S = 2.0
AGAIN_S = 5.0  # a server that listens, and answers nothing yet
BUSY_LOOKS = 3  # at an engine that others keep busy, a minute in all; then the run begins, and says so


class EngineCheck:
    def __init__(
        self, config: RunConfig, command: Sequence[str] | None = None, troubles: Troubles | None = None
    ) -> None:
        """`command`: the check, or None if it is done."""
        self._urls = config.engine.urls
        self._command = command
        (troubles or Troubles()).add(self.troubles)

    @property
    def pending(self) -> bool:
        return self._command is not None

    def troubles(self) -> list[str]:
        away = (
            f"the engine has not answered yet ({', '.join(self._urls)}): rollouts begin when it answers and has been "
            "checked. If it answers to the workers' hosts only, set engine.check = false"
        )
        return [away] if self.pending else []

    async def run(self) -> None:
        """RunError, in the engine's words, if every rollout would fail or be spoilt."""
        looks = 0
        while self._command:
            if not any(await asyncio.gather(*map(_listens, self._urls))):
                await asyncio.sleep(LISTEN_S)
                continue
            found = await examined(self._command)
            if refused := found.get("refused"):
                raise RunError(f"{refused}. Then run the same command again; `headpond doctor` shows more")
            looks += "busy" in found
            if "away" in found or ("busy" in found and looks < BUSY_LOOKS):
                await asyncio.sleep(AGAIN_S)
                continue
            if unchecked := found.get("unchecked", found.get("busy")):
                logger.warning("action=engine_unchecked %s", unchecked)
            else:
                logger.info("action=engine_checked")
            for noted in found.get("notes", ()):
                logger.warning("action=engine_noted %s", noted)
            self._command = None


async def _listens(url: str) -> bool:
    address = URL(url)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
        writer.close()
        return True
    return False


async def examined(command: Sequence[str]) -> dict[str, Any]:
    """What the child found; `unchecked` says why it found nothing."""
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(CHILD_S):
            output, errors = await child.communicate()
    except TimeoutError:
        return {"unchecked": f"the check of the engine did not end within {CHILD_S:g} s"}
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        said = errors.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"]
        return {"unchecked": said[-1]}
    return orjson.loads(output)
