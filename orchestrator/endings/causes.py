"""Why rollouts are lost to training: deaths by their error, drops by their reason. Counted since a group was last
admitted, to stop a run that gets nothing, and over the last endings, to show what it costs while it happens."""

import math
import re
from collections import Counter, deque
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from headpond.errors import RunError, sentence
from headpond.filters import FilterSettings, Mode
from headpond.orchestrator.duties.housekeeping import Troubles

# Rollouts that may die of one error before the first success: more of them would die of it too.
SAME_ERROR_MOST = 32
# Errors that are told apart; further ones are counted as `OTHERS`, so that texts cannot fill the
# memory.
KINDS_MOST = 64
OTHERS = "other errors"
# Endings that `recent` looks back on, each of one rollout or of those of a group that ended
# together.
RECENT = 512
SHOWN_MOST = 3
LOST_MOST = 0.5  # Share of lost rollouts from which the losses themselves are what a run waits for.
# Reasons of rollouts whose group can no longer be trained on: consequences of other losses, never
# a cause.
CANCELLED, TOO_SMALL = "cancelled", "group_too_small"
LEAST = 8  # Rollouts that must have ended before their share says anything.
# Groups without a difference in their rewards, one after the other, from which that is said.
FLAT_MOST = 32
OVERLONG = "filters.overlong"
# in place of the filters that have masked rollouts, if none of them masks any more
EARLIER = "earlier settings"
Ending = Literal["admitted", "masked", "died", "dropped"]
ADVICE = "Fix its cause, restart the workers if their code or settings changed, and run the same command again"
# What differs between two texts of one error: counts, addresses, ids, the attempt's number.
VARYING = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+")


def masking(settings: FilterSettings, matched: Container[str], *, group: bool) -> str:
    """The filters that have masked rollouts, as the configuration names them: those of the group, or those of single
    rollouts that have matched some."""
    if group:
        modes = {"zero_variance": settings.zero_variance.mode, "difficulty": settings.difficulty.mode}
        own = {f"custom_groups.{name}": each.mode for name, each in settings.custom_groups.items()}
    else:
        names = ("gibberish", "repetition", "overlong", "stale")
        modes = {name: getattr(settings, name).mode for name in names if name in matched}
        own = {f"custom.{name}": each.mode for name, each in settings.custom.items() if name in matched}
    return ", ".join(f"filters.{name}" for name, mode in (modes | own).items() if mode is Mode.MASK)


@dataclass(kw_only=True)
class DroppedRewards:
    """Those of the rollouts that were dropped since a group was last admitted."""

    number: int = 0
    total: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf

    def add(self, rewards: Iterable[float]) -> None:
        for reward in rewards:
            self.number += 1
            self.total += reward
            self.lowest, self.highest = min(self.lowest, reward), max(self.highest, reward)

    def __str__(self) -> str:
        """Tells a task that nothing solves from one that everything solves."""
        if not self.number:
            return "without a reward"
        if self.lowest == self.highest:
            return f"all with the reward {self.lowest:.4g}"
        return f"mean reward {self.total / self.number:.4g}, from {self.lowest:.4g} to {self.highest:.4g}"


class Causes:
    def __init__(self, troubles: Troubles | None = None) -> None:
        troubles = troubles or Troubles()
        troubles.add(lambda: [self.trouble])
        troubles.notes.add(lambda: [self.untrained, *self.notes])
        self._deaths = Counter[str]()
        self._texts: dict[str, str] = {}  # kind of error -> the last text of it
        self._drops = Counter[str]()
        self._dropped_rewards = DroppedRewards()
        self._succeeded = False
        # of the last admitted groups: whether their rewards are equal and their
        # advantages 0
        self._flat = deque[bool](maxlen=FLAT_MOST)
        self._endings = deque[tuple[Ending, str, int]]()
        self._recent = Counter[tuple[Ending, str]]()
        self._catching_up = False

    def catch_up(self, earlier: bool) -> None:
        """Count no death while `earlier` replies are applied: their cause may have been repaired since this start."""
        self._catching_up = earlier

    def generated(self) -> None:
        self._succeeded = True

    def admitted(self, rollouts: int = 0, *, masked: int = 0, masked_by: str = "", flat: bool = False) -> None:
        """`masked` of the rollouts are delivered without loss, because of the filters `masked_by`. `flat`: they have
        equal rewards, and the advantage 0."""
        self._flat.append(flat)
        self._end("admitted", "", rollouts - masked)
        self._end("masked", masked_by or EARLIER, masked)
        self._deaths.clear()
        self._drops.clear()
        self._dropped_rewards = DroppedRewards()
        self._texts = {kind: text for kind, text in self._texts.items() if self._recent["died", kind]}

    def dropped(self, reason: str, rollouts: int, rewards: Iterable[float] = ()) -> None:
        """`rewards`: of those that have one."""
        if reason in (CANCELLED, TOO_SMALL):  # the losses that made them so count
            return
        self._drops[reason] += rollouts
        self._dropped_rewards.add(rewards)
        self._end("dropped", reason, rollouts)

    def died(self, error: str, rollouts: int = 1) -> None:
        """Raises RunError when the first rollouts of this start all die of one error."""
        if self._catching_up:
            return
        kind = VARYING.sub("N", error)
        if kind not in self._texts and len(self._texts) >= KINDS_MOST:
            kind = OTHERS
        self._deaths[kind] += rollouts
        self._end("died", kind, rollouts)
        self._texts[kind] = error if kind != OTHERS else OTHERS
        if not self._succeeded and len(self._deaths) == 1 and self._deaths[kind] >= SAME_ERROR_MOST:
            raise RunError(
                f"stopped, because the first {self._deaths[kind]} rollouts died of the same error: {sentence(error)} "
                f"{ADVICE}"
            )

    def explain(self) -> str:
        """The dominant cause with its count and what to do, as two sentences."""
        deaths, drops = self._deaths.total(), self._drops.total()
        if deaths > drops:
            kind, number = self._deaths.most_common(1)[0]
            return f"Last error ({number} of {deaths}): {sentence(self._texts[kind])} {ADVICE}"
        reasons = ", ".join(f"{reason} {number}" for reason, number in self._drops.most_common()) or "unknown"
        return (
            f"Rollouts dropped by reason: {reasons} ({self._dropped_rewards}). Relax that filter or check the rewards, "
            "and run the same command again"
        )

    def recent(self) -> dict[str, Any]:
        """Of the last endings: how many rollouts, how many were admitted, and the most frequent losses."""
        by_kind = Counter[Ending]()
        for (ending, _), number in self._recent.items():
            by_kind[ending] += number
        return {
            "rollouts": by_kind.total(),
            "admitted": by_kind["admitted"] + by_kind["masked"],
            "masked": dict(self._most("masked")),
            "died": [{"error": self._texts.get(kind, kind), "rollouts": number} for kind, number in self._most("died")],
            "dropped": dict(self._most("dropped")),
        }

    @property
    def trouble(self) -> str | None:
        """The losses, while they are most of what ends."""
        ended = self._recent.total()
        died = sum(number for (ending, _), number in self._recent.items() if ending == "died")
        if ended < LEAST:
            return None
        if died > LOST_MOST * ended:
            (kind, number), *_ = self._most("died")
            return f"{died} of the last {ended} rollouts died, {number} of them of: {self._texts.get(kind, kind)}"
        if self.untrained:
            return self.untrained
        if not any(number for (ending, _), number in self._recent.items() if ending in ("admitted", "masked")):
            reasons = ", ".join(f"{reason} {number}" for reason, number in self._most("dropped"))
            return (
                f"none of the last {ended} rollouts was kept ({reasons}; {self._dropped_rewards}): relax that filter, "
                "or check the rewards"
            )
        return None

    @property
    def notes(self) -> list[str]:
        if len(self._flat) < FLAT_MOST or not all(self._flat):
            return []
        equal = f"nothing is learned: in each of the last {FLAT_MOST} groups all rollouts have the same reward"
        lowest = "If it is the lowest, look at a completion (`headpond try`) and at the flags of the engine's parsers"
        return [f"{equal}. {lowest}; if it is the highest, the examples are too easy"]

    @property
    def untrained(self) -> str | None:
        """That every rollout that is delivered is masked: the run proceeds, and the policy learns nothing."""
        by_filters = {text: number for (ending, text), number in self._recent.items() if ending == "masked"}
        by_filters.pop(EARLIER, None)
        masked = sum(by_filters.values())
        if masked < LEAST or self._recent["admitted", ""]:
            return None
        filters = max(by_filters, key=by_filters.__getitem__)
        settings = " and ".join(f'{name}.mode = "monitor"' for name in filters.split(", "))
        overlong = ", or raise policy.sampling.max_tokens: every completion ended at a limit of tokens"
        return (
            f"nothing is trained: the last {masked} rollouts that were kept are all masked by {filters}. "
            f"Set {settings}{overlong if OVERLONG in filters else ''}"
        )

    def _most(self, ending: Ending) -> list[tuple[str, int]]:
        of_kind = Counter({text: number for (kind, text), number in self._recent.items() if kind == ending and number})
        return of_kind.most_common(SHOWN_MOST)

    def _end(self, ending: Ending, text: str, rollouts: int) -> None:
        if not rollouts:
            return
        self._endings.append((ending, text, rollouts))
        self._recent[ending, text] += rollouts
        if len(self._endings) > RECENT:
            oldest, of_text, number = self._endings.popleft()
            self._recent[oldest, of_text] -= number
            if not self._recent[oldest, of_text]:
                del self._recent[oldest, of_text]
