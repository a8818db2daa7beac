"""Takes the orders of `penstock dead --retry` from the run directory: examples to be played again, a file for each."""

import logging
from pathlib import Path
from typing import Any

import orjson

from orchestrator.housekeeping import Reported
from orchestrator.ledger.ledger import Ledger
from orchestrator.poison import Poison
from penstock.config import RunConfig
from penstock.inspection.dead import FOLDER, RETRIED
from penstock.runtime.offload import in_io_thread

logger = logging.getLogger("penstock.orchestrator")


class Retries:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._environments = config.environments
        self._directory = config.run_dir / FOLDER
        self._ledger = ledger
        self._poison = Poison(config, ledger)

    async def run_once(self) -> None:
        """An order that was committed and whose file could not be deleted changes little when it is taken again."""
        for path, order in await in_io_thread(self._read):
            self._apply(order)
            await self._ledger.committed()
            with Reported(f"delete {path}"):
                await in_io_thread(path.unlink, missing_ok=True)

    def _read(self) -> list[tuple[Path, dict[str, Any]]]:
        orders: list[tuple[Path, dict[str, Any]]] = []
        for path in sorted(self._directory.glob("*.json")) if self._directory.is_dir() else []:
            try:
                orders.append((path, orjson.loads(path.read_bytes())))
            except (OSError, orjson.JSONDecodeError) as error:
                logger.error("action=order_unreadable path=%s error=%s", path, error)
        return orders

    def _apply(self, order: dict[str, Any]) -> None:
        for name, examples in order["examples"].items():
            size = self._ledger.number(f"examples:{name}")
            if name in self._environments:
                known = [example for example in examples if isinstance(example, int) and 0 <= example < size]
                self._poison.play_again(name, known)
                logger.info("action=played_again environment=%s examples=%d", name, len(known))
        self._ledger.set(RETRIED, max(self._ledger.number(RETRIED), int(order["until"])))
