"""Draw: a sampler draws examples in advance, so that planning never waits for it."""

import math
from collections.abc import Callable

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
        self._state = parts.ledger.state
        self._examples = Examples(parts.config, parts.ledger)

    def resume(self) -> None:
        """Ask samplers again that had ended or failed: their code or the data may have changed."""
        for name in self._examples.sampled:
            self._state.environments[name].data_ended = False

    def begin(self, groups_per_step: Callable[[], float]) -> None:
        """Add a job for every environment that has fewer examples drawn than a step may need."""
        if not self._examples.sampled:
            return
        count = max(DRAWN_LEAST, min(math.ceil(groups_per_step()), draw.DRAWN_LIMIT))
        for name in self._examples.sampled:
            environment, ready = self._state.environments[name], len(self._examples.drawn(name))
            wanted = min(count, self._examples.left(name) - ready)
            is_drawing = environment.last_draw in self._ledger.jobs
            may_draw = self._examples.size(name) and not is_drawing and not self._examples.used_up(name)
            if may_draw and ready < count and wanted > 0:
                self._state.draws += 1
                environment.last_draw = ids.draw_job(self._state.draws, name)
                environment.draw_count = int(wanted)
                environment.draw_until = environment.groups_ended
                self._ledger.add_job(environment.last_draw, self.name, name)

    def group_ended(self, group: GroupRecord, dropped: str | None = None) -> None:
        """A group has been admitted or dropped: its sampler receives it with the next draw."""
        name = group.environment
        if name not in self._examples.sampled:
            return
        environment = self._state.environments[name]
        row = environment.ended_groups[environment.groups_ended % HISTORY_MOST]
        row.ordinal = environment.groups_ended
        row.example = group.example
        row.rewards = [rollout.result.reward for rollout in group.rollouts if rollout.result]
        row.dropped = dropped
        environment.groups_ended += 1

    def fields(self, job: JobRecord) -> dict[str, str]:
        return {"environment": job.subject}

    def key(self, job: JobRecord) -> str:
        return inputs.key(self._run, job.id)

    async def inputs(self, job: JobRecord) -> draw.DrawInputs:
        name, environment = job.subject, self._state.environments[job.subject]
        return draw.DrawInputs(
            environment=name,
            size=self._examples.size(name),
            seed=key(self._config.seed, name),
            count=environment.draw_count,
            played=self._played(name, environment.draw_until),
            state=self._state.samplers[name].state or None,
        )

    def fits(self, job: JobRecord, result: draw.DrawResult) -> bool:
        return all(0 <= example < self._examples.size(job.subject) for example in result.examples)

    def settled(self, job: JobRecord, result: draw.DrawResult, reply: Reply) -> None:
        environment, sampler = self._state.environments[job.subject], self._state.samplers[job.subject]
        sampler.drawn = [*self._examples.drawn(job.subject), *result.examples]
        sampler.state = result.state
        environment.drawn_begun = 0
        environment.groups_reported = environment.draw_until
        environment.data_ended = not result.examples

    def died(self, job: JobRecord, why: str, error: str) -> None:
        sampler = self._config.environments[job.subject].sampler
        raise RunError(
            f"environments.{job.subject}.sampler = {sampler!r} failed: {sentence(why)} Fix it, restart the compute "
            "workers, then start the run again; nothing is lost"
        )

    def _played(self, name: str, until: int) -> list[PlayedGroup]:
        environment = self._state.environments[name]
        first = max(environment.groups_reported, until - HISTORY_MOST)
        rows = [(number, environment.ended_groups[number % HISTORY_MOST]) for number in range(first, until)]
        return [
            PlayedGroup(example=row.example, rewards=tuple(row.rewards), dropped=row.dropped)
            for number, row in rows
            if row.ordinal == number  # else it was overwritten while the draw waited
        ]
