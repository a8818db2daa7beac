"""Takes the requests of `headpond dead --retry` from the run directory: examples to be played again, one file each."""

import logging
from pathlib import Path
from typing import Any

import orjson

from headpond.config import RunConfig
from headpond.event_loop.offload import in_io_thread
from headpond.inspection.dead import FOLDER
from headpond.orchestrator.duties.housekeeping import Reported
from headpond.orchestrator.examples.poison import Poison
from headpond.orchestrator.ledger.ledger import Ledger

logger = logging.getLogger("headpond.orchestrator")


class RetryRequests:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._environments = config.environments
        self._directory = config.run_dir / FOLDER
        self._ledger = ledger
        self._poison = Poison(config, ledger)
        # files that were taken, or are no requests, and are still there
        self._done: set[Path] = set()
        self._reading = Reported(f"read the requests of headpond dead --retry in {self._directory}")

    async def run_once(self) -> None:
        """Each request is taken once, also if its file cannot be deleted: it may belong to another user."""
        requests: list[tuple[Path, dict[str, Any]]] = []
        with self._reading:
            requests = await in_io_thread(self._read)
        for path, request in requests:
            self._apply(request)
            await self._ledger.committed()
            self._done.add(path)
            with Reported(f"delete {path}"):
                await in_io_thread(path.unlink, missing_ok=True)

    def _read(self) -> list[tuple[Path, dict[str, Any]]]:
        paths = set(self._directory.glob("*.json")) if self._directory.is_dir() else set[Path]()
        self._done &= paths
        requests: list[tuple[Path, dict[str, Any]]] = []
        for path in sorted(paths - self._done):
            try:
                content: Any = orjson.loads(path.read_bytes())
                examples = {name: list(some) for name, some in dict(content["examples"]).items()}
                requests.append((path, {"examples": examples, "until": int(content["until"])}))
            except (PermissionError, ValueError, KeyError, TypeError) as error:
                logger.error("action=retry_unreadable path=%s error=%r", path, error)
                self._done.add(path)
        return requests

    def _apply(self, request: dict[str, Any]) -> None:
        for name, examples in request["examples"].items():
            if name in self._environments:
                size = self._ledger.state.environments[name].examples or 0
                known = [example for example in examples if isinstance(example, int) and 0 <= example < size]
                self._poison.play_again(name, known)
                logger.info("action=played_again environment=%s examples=%d", name, len(known))
        self._ledger.state.retried_group = max(self._ledger.state.retried_group, request["until"])
