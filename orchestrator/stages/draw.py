"""Draw: a sampler draws examples in advance, so that planning never waits for it. Its state is in the ledger:

sampler:NAME     its state after the last draw, text that only `headpond.data` reads
drawing:NAME     what the open draw was asked for, JSON: a repeated attempt is asked for the same; None without one
history:NAME:K   the group that ended as number N, at K = N % HISTORY_MOST; `history:NAME` counts them, and the
                 sampler has received those before `told:NAME`
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from headpond import ids
from headpond.data import PlayedGroup
from headpond.data.order import key
from headpond.errors import RunError, sentence
from headpond.orchestrator.examples.choice import Examples
from headpond.orchestrator.ledger.rows import GroupRecord, JobRecord
from headpond.orchestrator.stage import Parts, RunStage
from headpond.tasks import inputs
from headpond.tasks.stage import Reply
from headpond.tasks.stages import draw

DRAWN_LEAST = 16  # examples of one draw, which takes a round trip of a job
HISTORY_MOST = 1024  # groups that wait for a draw; the oldest are forgotten beyond that


class Draw(RunStage[draw.DrawResult]):
    stage = draw.STAGE

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._examples = Examples(parts.config, parts.ledger)

    def resume(self) -> None:
        """Ask samplers again that had ended or failed: their code or the data may have changed."""
        drawing = {job.subject for job in self._ledger.jobs.values() if job.stage == self.name}
        for name in self._examples.sampled:
            self._ledger.set(f"ended:{name}", 0)
            if name not in drawing:
                self._ledger.set(f"drawing:{name}", None)

    def begin(self, groups_per_step: Callable[[], float]) -> None:
        """Add a job for every environment that has fewer examples drawn than a step may need."""
        if not self._examples.sampled:
            return
        count = max(DRAWN_LEAST, min(math.ceil(groups_per_step()), draw.DRAWN_LIMIT))
        for name in self._examples.sampled:
            ready = len(self._examples.drawn(name))
            wanted = min(count, self._examples.left(name) - ready)
            open_draw = self._ledger.meta.get(f"drawing:{name}")
            may_draw = self._examples.size(name) and not open_draw and not self._examples.used_up(name)
            if may_draw and ready < count and wanted > 0:
                until = self._ledger.number(f"history:{name}")
                job = ids.draw_job(self._ledger.increment("draws"), name)
                self._ledger.set(f"drawing:{name}", _dumps({"job": job, "count": wanted, "until": until}))
                self._ledger.add_job(job, self.name, name)

    def group_ended(self, group: GroupRecord, dropped: str | None = None) -> None:
        """A group has been admitted or dropped: its sampler receives it with the next draw."""
        name = group.environment
        if name not in self._examples.sampled:
            return
        number = self._ledger.increment(f"history:{name}") - 1
        rewards = [rollout.result.reward for rollout in group.rollouts if rollout.result]
        self._ledger.set(f"history:{name}:{number % HISTORY_MOST}", _dumps([number, group.example, rewards, dropped]))

    def fields(self, job: JobRecord) -> dict[str, str]:
        return {"environment": job.subject}

    def key(self, job: JobRecord) -> str:
        return inputs.key(self._run, job.id)

    async def inputs(self, job: JobRecord) -> draw.DrawInputs:
        name, asked = job.subject, self._loads(f"drawing:{job.subject}", {})
        return draw.DrawInputs(
            environment=name,
            size=self._examples.size(name),
            seed=key(self._config.seed, name),
            count=asked["count"],
            played=self._played(name, asked["until"]),
            state=str(state) if (state := self._ledger.meta.get(f"sampler:{name}")) else None,
        )

    def needed_inputs(self) -> Iterable[str]:
        for name in self._examples.sampled:
            if asked := self._loads(f"drawing:{name}", None):
                yield inputs.key(self._run, asked["job"])

    def fits(self, job: JobRecord, result: draw.DrawResult) -> bool:
        return all(0 <= example < self._examples.size(job.subject) for example in result.examples)

    def settled(self, job: JobRecord, result: draw.DrawResult, reply: Reply) -> None:
        name, asked = job.subject, self._loads(f"drawing:{job.subject}", {})
        self._ledger.set(f"drawn:{name}", _dumps([*self._examples.drawn(name), *result.examples]))
        self._ledger.set(f"taken:{name}", 0)
        self._ledger.set(f"sampler:{name}", result.state)
        self._ledger.set(f"told:{name}", asked["until"])
        self._ledger.set(f"ended:{name}", int(not result.examples))
        self._ledger.set(f"drawing:{name}", None)

    def died(self, job: JobRecord, why: str, error: str) -> None:
        sampler = self._config.environments[job.subject].sampler
        raise RunError(
            f"environments.{job.subject}.sampler = {sampler!r} failed: {sentence(why)} Fix it, restart the compute "
            "workers, then start the run again; nothing is lost"
        )

    def _played(self, name: str, until: int) -> list[PlayedGroup]:
        told = max(self._ledger.number(f"told:{name}"), until - HISTORY_MOST)
        records = [self._loads(f"history:{name}:{number % HISTORY_MOST}", [-1]) for number in range(told, until)]
        return [
            PlayedGroup(example=record[1], rewards=tuple(record[2]), dropped=record[3])
            for number, record in zip(range(told, until), records, strict=True)
            if record[0] == number  # else it was overwritten while the draw waited
        ]

    def _loads(self, key: str, default: Any) -> Any:
        text = self._ledger.meta.get(key)
        return orjson.loads(str(text)) if text else default


def _dumps(value: object) -> str:
    return orjson.dumps(value).decode()
