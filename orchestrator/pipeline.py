"""The order of the stages:

    play -> score? -> filter -> advantage -> admitted        a group
    play -> score? -> evaluated                              a group of an evaluation
    compose -> batch_phase? -> encode -> seal                a step, of admitted groups

A stage is `tasks/stages/NAME.py` (message and body), `orchestrator/stages/NAME.py` (what the run does with it), and a
line here.
"""

from collections import Counter
from typing import Any

from headpond.config import RunConfig
from headpond.errors import RunError
from headpond.ledger.states import GroupState, RolloutState
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.endings.causes import Causes, masking
from headpond.orchestrator.examples.evaluation import Evaluations
from headpond.orchestrator.exchange.gates import Gates
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord, GroupRecord, JobRecord
from headpond.orchestrator.serving.serving_weights import ServingWeights
from headpond.orchestrator.stage import Parts, RunStage
from headpond.orchestrator.stages.advantage import Advantage
from headpond.orchestrator.stages.batch_phase import BatchPhase
from headpond.orchestrator.stages.draw import Draw
from headpond.orchestrator.stages.encode import Encode
from headpond.orchestrator.stages.filter import Filter
from headpond.orchestrator.stages.play import Play
from headpond.orchestrator.stages.score import Score
from headpond.orchestrator.stages.survey import Survey
from headpond.tasks import inputs


class Pipeline:
    def __init__(
        self,
        config: RunConfig,
        run: str,
        ledger: Ledger,
        gates: Gates,
        evaluations: Evaluations,
        weights: ServingWeights | None = None,
        *,
        batch_phase: bool = False,
        troubles: Troubles | None = None,
    ) -> None:
        """`batch_phase`: whether the estimator has one."""
        self._config = config
        self._run = run
        self._ledger = ledger
        self.causes = Causes(troubles)
        self.evaluations = evaluations
        self.weights = weights or ServingWeights(config, ledger)
        parts = Parts(
            config=config, run=run, ledger=ledger, gates=gates, causes=self.causes, weights=self.weights,
            advance=self.advance, drop=self.drop, advance_step=self.advance_step,
        )  # fmt: skip
        self.survey = Survey(parts)
        self.draw = Draw(parts)
        self.play = Play(parts)
        self.batch_phase = BatchPhase(parts)
        self.encode = Encode(parts)
        self.of_evaluation = (
            self.play,
            Score(parts),  # if its environment scores groups
        )
        self.of_group = (
            *self.of_evaluation,
            Filter(parts),
            Advantage(parts),
        )
        self.of_step = (self.batch_phase, self.encode) if batch_phase else (self.encode,)
        stages = (self.survey, self.draw, *self.of_group, self.batch_phase, self.encode)
        # name in the ledger -> stage
        self.stages: dict[str, RunStage[Any]] = {stage.name: stage for stage in stages}
        if unknown := sorted({job.stage for job in ledger.jobs.values()} - self.stages.keys()):
            raise RunError(
                f"the ledger has open jobs of the stage {unknown[0]}, which this version does not have: resume the run "
                "with the version that has it"
            )

    def stage_of(self, job: JobRecord) -> RunStage[Any]:
        return self.stages[job.stage]

    def files_of(self, job: JobRecord) -> list[str]:
        """Keys of the input files that the job reads."""
        stage = self.stage_of(job)
        return [*filter(None, [stage.key(job)]), *stage.reads_besides(job)]

    def release_inputs(self, batch: BatchRecord) -> None:
        """Call before the step is delivered or formed again: its jobs end with it."""
        self._ledger.unwanted_blobs += {key for job in self._ledger.jobs_of(batch) for key in self.files_of(job)}

    def advance(self, group: GroupRecord) -> None:
        """Begin the next stage that wants the group. After the last one, admit it, or give it to its evaluation."""
        stages = self.of_evaluation if group.is_evaluation else self.of_group
        names = [stage.name for stage in stages]
        for stage in stages[names.index(group.state) + 1 :]:
            if stage.wants(group):
                stage.enter(group)
                return
        if group.is_evaluation:
            self._evaluate(group)
        else:
            self._admit(group)

    @property
    def has_batch_phase(self) -> bool:
        return self.batch_phase in self.of_step

    def begin(self, batch: BatchRecord) -> None:
        """Begin the first stage of the step."""
        self.of_step[0].enter(batch)

    def advance_step(self, batch: BatchRecord) -> None:
        """Begin the last stage of the step."""
        self.encode.enter(batch)

    def drop(self, group: GroupRecord, reason: str) -> None:
        """Drop the rest of the group; the planner replaces it. An evaluation ends without it."""
        if group.is_evaluation:
            self._evaluate(group)
            return
        for rollout in group.of(RolloutState.GENERATED):
            self._ledger.drop(rollout, reason)
        dropped = group.of(RolloutState.FILTERED)
        for why, number in Counter(rollout.reason for rollout in dropped).items():
            rewards = [rollout.result.reward for rollout in dropped if rollout.result and rollout.reason == why]
            self.causes.dropped(why or reason, number, rewards)
        self._end(group, reason)
        self._ledger.event(group.id, "dropped", reason)
        self._ledger.state.dropped_in_a_row += 1
        self._ledger.enter(group, GroupState.CLOSED)

    def _admit(self, group: GroupRecord) -> None:
        """A step may be composed of it from now on."""
        ledger, environment = self._ledger, self._ledger.state.environments[group.environment]
        for rollout in group.of(RolloutState.GENERATED):
            ledger.move(rollout, RolloutState.ADMITTED)
            environment.tokens_admitted += rollout.result.completion_tokens if rollout.result else 0
        ledger.enter(group, GroupState.ADMITTED)
        self._end(group)
        ledger.state.dropped_in_a_row = 0
        ledger.state.groups_admitted += 1
        environment.groups_admitted += 1
        self._count_admitted(group)

    def _evaluate(self, group: GroupRecord) -> None:
        self.evaluations.scored(group)
        self._end(group)

    def _end(self, group: GroupRecord, dropped: str | None = None) -> None:
        """No stage works on it any more."""
        self.draw.group_ended(group, dropped)
        self._ledger.unwanted_blobs.append(inputs.key(self._run, group.id))

    def _count_admitted(self, group: GroupRecord) -> None:
        """Count what the group adds to the loss."""
        rollouts = group.of(RolloutState.ADMITTED)
        masked = sum(rollout.masked for rollout in rollouts)
        matched = self._ledger.state.matched
        masked_by = masking(self._config.filters, matched, group=group.masked) if masked else ""
        equal = len({rollout.result.reward for rollout in rollouts if rollout.result}) == 1
        credited = any(rollout.advantage or (rollout.result and rollout.result.credit) for rollout in rollouts)
        self.causes.admitted(len(rollouts), masked=masked, masked_by=masked_by, flat=equal and not credited)
