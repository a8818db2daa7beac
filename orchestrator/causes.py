"""Why rollouts are lost to training: deaths by their error, drops by their reason, since a group was last admitted."""

import re
from collections import Counter

from penstock.errors import RunError

SAME_ERROR_MOST = 32
"""Rollouts that may die of one error before the first success: more of them would die of it too."""
KINDS_MOST = 64
"""Errors that are told apart; further ones are counted as `OTHERS`, so that texts cannot fill the memory."""
OTHERS = "other errors"
ADVICE = "Fix its cause, restart the workers if their code or settings changed, and run the same command again"
# What differs between two texts of one error: counts, addresses, ids, the attempt's number.
VARYING = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+")


class Causes:
    def __init__(self) -> None:
        self._deaths = Counter[str]()
        self._texts: dict[str, str] = {}
        """kind of error -> the last text of it"""
        self._drops = Counter[str]()
        self._succeeded = False
        self.catching_up = False
        """the replies that are applied were sent before this start: their cause may have been repaired since"""

    def generated(self) -> None:
        self._succeeded = True

    def admitted(self) -> None:
        self._deaths.clear()
        self._texts.clear()
        self._drops.clear()

    def dropped(self, reason: str, rollouts: int) -> None:
        self._drops[reason] += rollouts

    def died(self, error: str, rollouts: int = 1) -> None:
        """Raises RunError when the first rollouts of this start all die of one error."""
        if self.catching_up:
            return
        kind = VARYING.sub("N", error)
        if kind not in self._texts and len(self._texts) >= KINDS_MOST:
            kind = OTHERS
        self._deaths[kind] += rollouts
        self._texts[kind] = error if kind != OTHERS else OTHERS
        if not self._succeeded and len(self._deaths) == 1 and self._deaths[kind] >= SAME_ERROR_MOST:
            raise RunError(
                f"stopped, because the first {self._deaths[kind]} rollouts died of the same error: {error}. {ADVICE}"
            )

    def explain(self) -> str:
        """The dominant cause with its count and what to do, as two sentences."""
        deaths, drops = self._deaths.total(), self._drops.total()
        if deaths > drops:
            kind, number = self._deaths.most_common(1)[0]
            return f"Last error ({number} of {deaths}): {self._texts[kind]}. {ADVICE}"
        reasons = ", ".join(f"{reason} {number}" for reason, number in self._drops.most_common()) or "unknown"
        return (
            f"Rollouts dropped by reason: {reasons}. Relax that filter or check the rewards, and run the same command "
            "again"
        )
