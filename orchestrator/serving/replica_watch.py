"""Polls every replica once a second, and decides which of them may serve.

The least version that may serve rises to a published one when every replica that answers has it, or after
`weight_update_timeout_s`.
"""

import asyncio
import logging
import time
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
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.serving.serving_weights import ServingWeights
from headpond.orchestrator.trainer import Trainer

logger = logging.getLogger("headpond.replicas")

JUDGE_S = 0.25
PUBLISH = {
    "trainer": "load the weights into it and name them (vLLM: POST /update_weight_version)",
    "headpond": "the run loads the weights into it again until that succeeds",
}  # what follows, by `engine.weight_update`


class ReplicaWatch:
    def __init__(
        self,
        config: RunConfig,
        run: str,
        ledger: Ledger,
        trainer: Trainer,
        weights: ServingWeights,
        troubles: Troubles | None = None,
    ) -> None:
        self._settings = config.engine
        self._run = run
        self._ledger = ledger
        self._trainer = trainer
        self._weights = weights
        self._replicas = weights.replicas
        self._version = ledger.state.policy_version
        self._published_at = time.monotonic()  # since when this process has `_version`
        self._refused: dict[str, str] = {}
        self._refused_at: dict[str, float] = {}  # since when each of them is refused
        # those of them whose refusal is more than an ordinary update
        self._told: dict[str, str] = {}
        troubles = troubles or Troubles()
        troubles.add(self.troubles)
        troubles.notes.add(self.notes)

    async def run(self) -> None:
        if not self._weights.reported:
            return
        async with EngineControl.open(self._settings) as control, polling(control.poll_version, self._replicas):
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
                self._weights.abandoned.returned_to(version, from_version=self._version)
            self._version, self._published_at = version, now
            self._ledger.state.least_version = min(version, self._ledger.state.least_version)
        self._weights.abandoned.judge(version)
        late = now - self._published_at > self._settings.weight_update_timeout_s
        answering = [replica for replica in self._replicas if replica.answers]
        current = [replica for replica in answering if self._weights.has(replica, version)]
        if version > START_VERSION and current and not self._ledger.state.version_reported:
            self._ledger.state.version_reported = True
        if late and answering and not self._ledger.state.version_reported and version > START_VERSION:
            self._stop_without_versions(answering[0])
        if answering and self._ledger.state.least_version < version and (late or len(current) == len(answering)):
            self._ledger.state.least_version = version
        self._tell_refused(now)

    def troubles(self) -> list[str | None]:
        strict = self._weights.strict
        awaited = self._weights.awaited(self._ledger.state.steps_delivered) if strict else None
        routers = [
            f"{replica.url} is a router: several servers answer there, with different versions. Name the servers "
            "themselves in engine.urls; until then versions are not exact"
            for replica in self._replicas
            if replica.router
        ]
        return [*self._told.values(), *routers, awaited]

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
            for replica in self._replicas
        }

    def refused(self, replica: Replica) -> str | None:
        """Why it serves nothing that is trained on, and what follows."""
        label, abandoned = replica.label, self._weights.abandoned.held_by(replica)
        why = replica.why_refused(Orders(run=self._run, least_version=self._weights.least_version))
        if why is None and abandoned:
            why = f"{replica.url} calls its weights {abandoned!r}, which the trainer has abandoned"
        return f"{why}: {PUBLISH[self._settings.weight_update]}" if why and not (label and label.unfit) else why

    def _tell_refused(self, now: float) -> None:
        before = self._told
        self._refused = {replica.url: why for replica in self._replicas if (why := self.refused(replica))}
        self._refused_at = {url: self._refused_at.get(url, now) for url in self._refused}
        refused = [replica for replica in self._replicas if replica.url in self._refused]
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
        return label.version >= self._ledger.state.least_version and not self._weights.abandoned.held_by(replica)

    def _take_start_version(self) -> None:
        """What replicas say before the first publication is the version that the run starts with."""
        if self._trainer.published or self._ledger.state.policy_version > START_VERSION:
            return
        said = [replica.label.version for replica in self._replicas if replica.label and replica.label.numbered]
        if (start := max(said, default=START_VERSION)) == START_VERSION:
            return
        self._ledger.state.policy_version = start
        if not self._ledger.state.steps_delivered:  # later it is a trainer that has loaded and not yet published
            self._ledger.state.start_version = start
            logger.warning("action=start_version %s", *self.notes())

    def _refuse_other_runs(self) -> None:
        for replica in self._replicas:
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
