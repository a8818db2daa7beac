"""Poison examples: those whose rollouts die again and again while the rollouts of others do not. They are not played
until `headpond dead --retry`."""

import logging
from collections.abc import Iterable
from typing import Any

from headpond.config import RunConfig
from headpond.errors import shortened
from headpond.ledger.state_rows import Rows
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import GroupRecord

logger = logging.getLogger("headpond.poison")

DEATHS_MOST = 256  # examples whose deaths are counted; the oldest are forgotten beyond that
POISON_MOST = 1_000  # examples in quarantine; the oldest are played again beyond that
AGAIN_MOST = 10_000
ERROR_CHARACTERS = 200
NOTED_MOST = 3


class Poison:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._most = config.recovery.max_example_deaths
        self._ledger = ledger
        self._state = ledger.state

    def died(self, group: GroupRecord, error: str) -> None:
        """A rollout of the group's example has died. In an outage many die and none is generated: of the deaths between
        two generated rollouts only the first example's count, as one."""
        name, example, generated = group.environment, group.example, self._state.rollouts_generated
        last_name, last_example, then = self._state.last_death or (name, example, generated)
        self._state.last_death = [name, example, generated]
        deaths = self._state.environments[name].deaths
        row = deaths[example]
        counts = generated != row.generated and ((last_name, last_example) == (name, example) or generated != then)
        deaths.forget(example)
        if row.number + counts >= self._most:
            self._quarantine(name, example, row.number + counts, error)
        elif row.number + counts:
            row.number += counts
            row.generated = generated if counts else row.generated
            deaths[example] = row  # the newest is the last one
            _forget_oldest(deaths, DEATHS_MOST)

    def generated(self, group: GroupRecord) -> None:
        self._state.environments[group.environment].deaths.forget(group.example)

    def play_again(self, name: str, examples: Iterable[int]) -> None:
        """Lift their quarantine and play them first."""
        environment = self._state.environments[name]
        for example in examples:
            if example not in environment.again and len(environment.again) < AGAIN_MOST:
                environment.again[example].touch()
        for example in environment.again:
            environment.quarantined.forget(example)
            environment.deaths.forget(example)

    def notes(self, environments: Iterable[str]) -> list[str]:
        """The examples that are not played, for the status."""
        texts: list[str] = []
        for name in environments:
            quarantined = self._state.environments[name].quarantined
            for example, row in list(quarantined.items())[-NOTED_MOST:]:
                texts.append(
                    f"example {example} of {name} is not played again until `headpond dead --retry`, because its "
                    f"rollouts die: {row.error}"
                )
            if len(quarantined) > NOTED_MOST:
                texts.append(f"{len(quarantined)} examples of {name} are not played again: `headpond dead` lists them")
        return texts

    def _quarantine(self, name: str, example: int, deaths: int, error: str) -> None:
        quarantined = self._state.environments[name].quarantined
        quarantined[example].error = shortened(error, ERROR_CHARACTERS)
        _forget_oldest(quarantined, POISON_MOST)
        self._ledger.event(f"{name}/{example}", "quarantined", f"{deaths} rollouts died, the last of: {error}")
        logger.error(
            "action=example_quarantined environment=%s example=%s deaths=%d error=%s", name, example, deaths, error
        )


def _forget_oldest(rows: Rows[int, Any], most: int) -> None:
    if len(rows) > most:
        rows.forget(next(iter(rows)))
