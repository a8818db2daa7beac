"""The engine's replicas as the run sees them: which weights each reports, and which of them may serve.

Asks every replica once a second. Jobs carry `least_version`, and workers send nothing to a replica with older weights.
It rises to a published version when every replica that answers has it, or after `weight_update_timeout_s`.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from headpond.config import RunConfig
from headpond.engines.replicas.control import (
    LOADING,
    START_VERSION,
    EngineControl,
    Orders,
    Replica,
    polling,
    reload_advice,
)
from headpond.errors import RunError
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.trainer import Trainer
from headpond.tasks.stages.play import ABANDONED_LIMIT

logger = logging.getLogger("headpond.replicas")

JUDGE_S = 0.25
PUBLISH = {
    "trainer": "load the weights into it and name them (vLLM: POST /update_weight_version)",
    "headpond": "the run loads the weights into it again until that succeeds",
}
"""what follows, by `engine.weight_update`"""


class AbandonedWeights:
    """Versions that the trainer gave up when it resumed from an older checkpoint, while a replica still has them.

    Their numbers are used again for other weights: a replica that has the old ones serves nothing meanwhile.
    """

    def __init__(self, ledger: Ledger, replicas: Sequence[Replica]) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self._held: dict[str, str] = {}
        """replica -> what it calls the abandoned weights"""
        self._unasked = {replica.url for replica in replicas} if self.versions else set[str]()
        """replicas that have not yet said what they have"""

    @property
    def versions(self) -> tuple[int, ...]:
        """A replica that names one of them may serve no job that is submitted now."""
        return tuple(self._ledger.state.abandoned_versions)

    def returned_to(self, version: int, *, from_version: int) -> None:
        """The trainer has published `version` after the higher `from_version`."""
        held = {
            replica.url: replica.label
            for replica in self._replicas
            if replica.label and replica.label.version > version
        }
        self._held = {url: label.text for url, label in held.items()}
        self._unasked = {replica.url for replica in self._replicas if not replica.answers}
        numbers = {from_version, *(label.version for label in held.values())}
        self._ledger.state.abandoned_versions = sorted(numbers)[-ABANDONED_LIMIT:]

    def judge(self, version: int) -> None:
        """Look at the replicas again; `version` is the published one."""
        if not (versions := self.versions):
            return
        for replica in self._replicas:
            if (label := replica.label) is None:
                continue
            if replica.url in self._unasked and label.version in versions and label.version != version:
                self._held[replica.url] = label.text
            elif self._held.get(replica.url) != label.text:
                self._held.pop(replica.url, None)
            self._unasked.discard(replica.url)
        # A replica that never answers does not keep others from a number that is published again.
        if not self._held and (not self._unasked or version in versions):
            self._ledger.state.abandoned_versions = []

    def held_by(self, replica: Replica) -> str | None:
        """What the replica calls its abandoned weights."""
        return self._held.get(replica.url)


class ReplicaWatch:
    def __init__(self, config: RunConfig, run: str, ledger: Ledger, trainer: Trainer) -> None:
        self._settings = config.engine
        self._strict = config.trainer.max_steps_ahead == 0
        self._run = run
        self._ledger = ledger
        self._trainer = trainer
        self._version = ledger.state.policy_version
        self._published_at = time.monotonic()
        """since when this process knows `_version`"""
        self._refused: dict[str, str] = {}
        self._refused_at: dict[str, float] = {}
        """since when each of them is refused"""
        self._told: dict[str, str] = {}
        """those of them whose refusal is more than an ordinary update"""
        self.all = [Replica(url=url) for url in config.engine.urls]
        self.abandoned = AbandonedWeights(ledger, self.all)

    @property
    def reported(self) -> bool:
        """Whether versions are what replicas say."""
        return self._settings.versions == "reported"

    async def run(self) -> None:
        if not self.reported:
            return
        async with EngineControl.open(self._settings) as control, polling(control.poll_version, self.all):
            while True:
                self.judge(time.monotonic())
                await asyncio.sleep(JUDGE_S)

    def judge(self, now: float) -> None:
        """Decide anew which replicas may serve. RunError if none can be used at all."""
        self._refuse_other_runs()
        self._take_start_version()
        version = self._ledger.state.policy_version
        if version != self._version:
            if version < self._version:
                self.abandoned.returned_to(version, from_version=self._version)
            self._version, self._published_at = version, now
            self._ledger.state.least_version = min(version, self._ledger.state.least_version)
        self.abandoned.judge(version)
        late = now - self._published_at > self._settings.weight_update_timeout_s
        answering = [replica for replica in self.all if replica.answers]
        current = [replica for replica in answering if self._has(replica, version)]
        if version > START_VERSION and current and not self._ledger.state.version_reported:
            self._ledger.state.version_reported = True
        if late and answering and not self._ledger.state.version_reported and version > START_VERSION:
            self._stop_without_versions(answering[0])
        if answering and self._ledger.state.least_version < version and (late or len(current) == len(answering)):
            self._ledger.state.least_version = version
        self._tell_refused(now)

    @property
    def least_version(self) -> int:
        """Of the weights that may serve a job that is submitted now."""
        if not self.reported:
            return START_VERSION
        return self._ledger.state.policy_version if self._strict else self._ledger.state.least_version

    @property
    def served_version(self) -> int:
        """The newest version that every replica has, as far as replicas say."""
        if not self.reported or not any(replica.answers for replica in self.all):
            return self._ledger.state.policy_version
        return self._ledger.state.least_version

    def may_begin(self, step: int) -> bool:
        """Whether rollouts of `step` may begin. With `max_steps_ahead = 0`, every replica that serves must have the
        version that the step before was trained into."""
        if not self._strict:
            return True
        first = self._ledger.state.steps_delivered + len(self._ledger.batches)
        return step <= first and self._awaited(step) is None

    @property
    def troubles(self) -> list[str]:
        awaited = self._awaited(self._ledger.state.steps_delivered) if self._strict else None
        routers = [
            f"{replica.url} is a router: several servers answer there, with different versions. Name the servers "
            "themselves in engine.urls; until then versions are not exact"
            for replica in self.all
            if replica.router
        ]
        return [*self._told.values(), *routers, *([awaited] if awaited else [])]

    @property
    def notes(self) -> list[str]:
        """About weights that were in the engine before this run."""
        if not (start := self._ledger.state.start_version) or self._trainer.published:
            return []
        note = (
            f"the engine has weights that are called by a number, so the run starts with version {start}. A trainer "
            f"that continues from them publishes version {start + 1} next: publish_policy(reader.start_version + "
            f"batch.step + 1). If it begins with other weights, stop the run, {reload_advice(self._settings)}, and "
            "start a new run with another run_dir"
        )
        return [note]

    def status(self) -> dict[str, Any]:
        return {
            replica.url: {
                "weights": replica.label.text if replica.label else None,
                "serves": bool(replica.answers) and replica.url not in self._refused,
            }
            for replica in self.all
        }

    def refused(self, replica: Replica) -> str | None:
        """Why it serves nothing that is trained on, and what follows."""
        label, abandoned = replica.label, self.abandoned.held_by(replica)
        why = replica.why_refused(Orders(run=self._run, least_version=self.least_version))
        if why is None and abandoned:
            why = f"{replica.url} calls its weights {abandoned!r}, which the trainer has abandoned"
        return f"{why}: {PUBLISH[self._settings.weight_update]}" if why and not (label and label.unfit) else why

    def _has(self, replica: Replica, version: int) -> bool:
        label = replica.label
        named = label is not None and (label.numbered or version == START_VERSION)
        if label is None or label.unfit or self.abandoned.held_by(replica):
            return False
        return named and label.version >= version

    def _awaited(self, step: int) -> str | None:
        """What rollouts of `step` wait for."""
        version = self._ledger.state.policy_version
        if self._ledger.state.composed_step < step and version <= self._ledger.state.composed_version:
            if step == 0:
                return None
            return f"step {step} begins when the trainer has published version {step} (trainer.max_steps_ahead = 0)"
        if not self.reported:
            return None
        behind = [
            replica.url
            for replica in self.all
            if replica.answers and not replica.failed_polls and not self._has(replica, version)
        ]
        if behind:
            return f"step {step} begins when every replica has version {version}: {', '.join(behind)} has not"
        return None

    def _tell_refused(self, now: float) -> None:
        before = self._told
        self._refused = {replica.url: why for replica in self.all if (why := self.refused(replica))}
        self._refused_at = {url: self._refused_at.get(url, now) for url in self._refused}
        refused = [replica for replica in self.all if replica.url in self._refused]
        self._told = {each.url: self._refused[each.url] for each in refused if not self._is_updated(each, now)}
        for url, why in self._told.items():
            if url not in before:
                logger.warning("action=replica_refused %s", why)
        for url in before.keys() - self._refused.keys():
            logger.info("action=replica_admitted url=%s", url)

    def _is_updated(self, replica: Replica, now: float) -> bool:
        """Whether a refused replica is in an ordinary update, which ends without the user. With `trainer`, one that has
        gone back behind what every replica had, or still has abandoned weights, was restarted or forgotten."""
        label = replica.label
        if label is None or now - self._refused_at[replica.url] > self._settings.weight_update_timeout_s:
            return False
        if label.unfit or self._settings.weight_update == "headpond":
            return label.unfit in (None, LOADING)
        return label.version >= self._ledger.state.least_version and not self.abandoned.held_by(replica)

    def _take_start_version(self) -> None:
        """What replicas say before the first publication is the version that the run starts with."""
        if self._trainer.published or self._ledger.state.policy_version > START_VERSION:
            return
        said = [replica.label.version for replica in self.all if replica.label and replica.label.numbered]
        if (start := max(said, default=START_VERSION)) == START_VERSION:
            return
        self._ledger.state.policy_version = start
        if not self._ledger.state.steps_delivered:  # later it is a trainer that has loaded and not yet published
            self._ledger.state.start_version = start
            logger.warning("action=start_version %s", *self.notes)

    def _refuse_other_runs(self) -> None:
        for replica in self.all:
            label = replica.label
            if label and label.run not in (None, self._run):
                raise RunError(
                    f"{replica.url} has weights that run {label.run} loaded ({label.text!r}): two runs cannot load "
                    f"weights into one engine. If that run has ended, {reload_advice(self._settings)}"
                )

    def _stop_without_versions(self, replica: Replica) -> None:
        if self._settings.weight_update == "headpond":
            return
        says = f"calls its weights {replica.label.text!r}" if replica.label else "does not say which weights it has"
        raise RunError(
            f"version {self._version} was published {self._settings.weight_update_timeout_s:g} s ago "
            f"(engine.weight_update_timeout_s), and no replica has reported a published version: {replica.url} {says}. "
            f"Let the trainer name the weights that it loads (vLLM 0.30 with VLLM_SERVER_DEV_MODE=1: POST "
            '/update_weight_version), or set engine.versions = "announced" if the engine cannot say'
        )
