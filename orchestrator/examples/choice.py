"""Which example the next group of an environment plays, and when its examples are used up. The state is in the ledger:

    begun:NAME       groups that have begun; with `uniform`, the position in the environment's order
    order:NAME       the order of the present epoch
    drawn:NAME       with another sampler: examples drawn in advance, JSON; `taken:NAME` of them have begun
    sampler:NAME     its state after the last draw, text that only `headpond.sampling` reads
    drawing:NAME     what the open draw was asked for, JSON: a repeated attempt is asked for the same; None without one
    ended:NAME       1 when its sampler has drawn nothing
    history:NAME:K   the group that ended as number N, at K = N % HISTORY_MOST; `history:NAME` counts them, and the
                     sampler knows of `told:NAME`

Samplers run on compute workers, as jobs: no code of a user runs on this loop.
"""

import math
from typing import Any

import orjson

from headpond import ids
from headpond.config import RunConfig
from headpond.errors import RunError
from headpond.ledger.states import JobKind
from headpond.messages import DRAWN_LIMIT, DrawInputs, DrawResult
from headpond.orchestrator.examples.poison import Poison
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.records import GroupRecord, JobRecord, Value
from headpond.sampling import UNIFORM, Order, PlayedGroup, example_at
from headpond.sampling.order import key

DRAWN_LEAST = 16  # examples of one draw, which takes a round trip of a job
HISTORY_MOST = 1024  # groups that wait for a draw; the oldest are forgotten beyond that


class Examples:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._config = config
        self._ledger = ledger
        self.sampled = [name for name in config.environments if not self._is_uniform(name)]
        """environments whose examples a sampler draws"""
        self.poison = Poison(config, ledger)
        self._parsed: dict[str, tuple[Value, list[int]]] = {}

    def resume(self) -> None:
        """Ask samplers again that had ended or failed: their code or the data may have changed."""
        drawing = {job.subject for job in self._ledger.jobs.values() if job.kind is JobKind.DRAW}
        for name in self.sampled:
            self._ledger.set(f"ended:{name}", 0)
            if name not in drawing:
                self._ledger.set(f"drawing:{name}", None)

    def size(self, name: str) -> int:
        """0 until the environment has been surveyed."""
        return self._ledger.number(f"examples:{name}")

    def ready(self, name: str) -> float:
        """Groups that may begin now."""
        drawn = math.inf if self._is_uniform(name) else len(self._drawn(name))
        return self.poison.again(name) + min(self._left(name), drawn)

    def used_up(self, name: str) -> bool:
        ended = bool(self._ledger.number(f"ended:{name}")) and not self.ready(name)
        return self.size(name) > 0 and (ended or not self._left(name)) and not self.poison.again(name)

    def take(self, name: str) -> int | None:
        """The next example that is not in quarantine; None if there is none. Commit it with the group that plays it."""
        if self.poison.again(name):
            return self.poison.take_again(name)
        for _ in range(self.size(name)):
            if not self._left(name) or not (self._is_uniform(name) or self._drawn(name)):
                return None
            if not self.poison.is_poison(name, example := self._take_next(name)):
                return example
        raise RunError(
            f"every example of {name!r} is in quarantine, because its rollouts die: `headpond dead` says why. Fix it, "
            "then run `headpond dead --retry` and the same command again"
        )

    def _take_next(self, name: str) -> int:
        number = self._ledger.increment(f"begun:{name}") - 1
        if not self._is_uniform(name):
            example = self._drawn(name)[0]
            self._ledger.increment(f"taken:{name}")
            return example
        order = self._order(name, begins=number % self.size(name) == 0)
        return example_at(number, size=self.size(name), order=order, seed=self._config.seed, name=name)

    def _left(self, name: str) -> float:
        epochs = self._config.environments[name].epochs
        return math.inf if epochs is None else max(0, epochs * self.size(name) - self._ledger.number(f"begun:{name}"))

    def _is_uniform(self, name: str) -> bool:
        return self._config.environments[name].sampler == UNIFORM

    def _order(self, name: str, *, begins: bool) -> Order:
        """An epoch keeps the order that it began with, so that no example is skipped or played twice. One that began
        with another sampler goes on in order."""
        if begins:
            self._ledger.set(f"order:{name}", self._config.environments[name].order)
        return "shuffled" if self._ledger.meta.get(f"order:{name}") == "shuffled" else "in_order"

    # samplers

    def draw(self, groups_per_step: float) -> None:
        """Add a job for every environment that has fewer examples drawn than a step may need."""
        count = max(DRAWN_LEAST, min(math.ceil(groups_per_step), DRAWN_LIMIT))
        for name in self.sampled:
            ready = len(self._drawn(name))
            wanted = min(count, self._left(name) - ready)
            may_draw = self.size(name) and not self._ledger.meta.get(f"drawing:{name}") and not self.used_up(name)
            if may_draw and ready < count and wanted > 0:
                until = self._ledger.number(f"history:{name}")
                job = ids.draw_job(self._ledger.increment("draws"), name)
                self._ledger.set(f"drawing:{name}", _dumps({"job": job, "count": wanted, "until": until}))
                self._ledger.add_job(job, JobKind.DRAW, name)

    def open_draws(self) -> list[str]:
        """Their jobs."""
        return [asked["job"] for name in self.sampled if (asked := self._loads(f"drawing:{name}", None))]

    def draw_inputs(self, job: JobRecord) -> DrawInputs:
        name, asked = job.subject, self._loads(f"drawing:{job.subject}", {})
        return DrawInputs(
            environment=name,
            size=self.size(name),
            seed=key(self._config.seed, name),
            count=asked["count"],
            played=self._played(name, asked["until"]),
            state=str(state) if (state := self._ledger.meta.get(f"sampler:{name}")) else None,
        )

    def fits(self, name: str, result: DrawResult) -> bool:
        return all(0 <= example < self.size(name) for example in result.examples)

    def settle(self, name: str, result: DrawResult) -> None:
        asked = self._loads(f"drawing:{name}", {})
        self._ledger.set(f"drawn:{name}", _dumps([*self._drawn(name), *result.examples]))
        self._ledger.set(f"taken:{name}", 0)
        self._ledger.set(f"sampler:{name}", result.state)
        self._ledger.set(f"told:{name}", asked["until"])
        self._ledger.set(f"ended:{name}", int(not result.examples))
        self._ledger.set(f"drawing:{name}", None)

    def played(self, group: GroupRecord, dropped: str | None = None) -> None:
        """A group has been admitted or dropped: its sampler is told with the next draw."""
        name = group.environment
        if name not in self._config.environments or self._is_uniform(name):
            return
        number = self._ledger.increment(f"history:{name}") - 1
        rewards = [rollout.result.reward for rollout in group.rollouts if rollout.result]
        self._ledger.set(f"history:{name}:{number % HISTORY_MOST}", _dumps([number, group.example, rewards, dropped]))

    def _played(self, name: str, until: int) -> list[PlayedGroup]:
        told = max(self._ledger.number(f"told:{name}"), until - HISTORY_MOST)
        records = [self._loads(f"history:{name}:{number % HISTORY_MOST}", [-1]) for number in range(told, until)]
        return [
            PlayedGroup(example=record[1], rewards=tuple(record[2]), dropped=record[3])
            for number, record in zip(range(told, until), records, strict=True)
            if record[0] == number  # else it was overwritten while the draw waited
        ]

    def _drawn(self, name: str) -> list[int]:
        text, (known, drawn) = self._ledger.meta.get(f"drawn:{name}"), self._parsed.get(name, (None, []))
        if text is not known:  # parsed once: 1,024 examples take 0.1 ms
            drawn = orjson.loads(str(text)) if text else []
            self._parsed[name] = text, drawn
        return drawn[self._ledger.number(f"taken:{name}") :]

    def _loads(self, key: str, default: Any) -> Any:
        text = self._ledger.meta.get(key)
        return orjson.loads(str(text)) if text else default


def _dumps(value: object) -> str:
    return orjson.dumps(value).decode()
