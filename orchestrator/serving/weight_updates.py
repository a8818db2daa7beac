"""Loads published weights into every replica, with `engine.weight_update = "headpond"`.

A replica is brought up to date whenever it calls its weights by another name than the published version's: after a
publication, after its own restart, and after a failed update, again and again. Meanwhile its name for them keeps it
from serving.
"""

import asyncio
import logging
import time

from headpond.batches.signals import PublishedPolicy
from headpond.config import RunConfig
from headpond.engines.replicas.control import UNREACHABLE, EngineControl, Replica, label_of
from headpond.errors import InfrastructureFailure
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.serving.serving_weights import ServingWeights
from headpond.orchestrator.trainer import Trainer

logger = logging.getLogger("headpond.weights")

CHECK_S = 0.1
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0


class WeightUpdates:
    def __init__(
        self, config: RunConfig, run: str, trainer: Trainer, weights: ServingWeights, troubles: Troubles
    ) -> None:
        self._settings = config.engine
        self._run = run
        self._trainer = trainer
        self._weights = weights
        self._failed: dict[str, str] = {}  # replica -> why its last update failed
        troubles.add(self._troubles)

    async def run(self) -> None:
        if self._settings.weight_update != "headpond":
            return
        async with EngineControl.open(self._settings) as control, asyncio.TaskGroup() as group:
            for replica in self._weights.replicas:
                group.create_task(self._keep_current(control, replica))

    def _troubles(self) -> list[str]:
        policy = self._trainer.state.policy
        if self._settings.weight_update == "headpond" and policy and policy.weights is None:
            published = f"version {policy.version} was published without weights"
            return [f'{published}: call publish_policy(version, weights=DIR), or set engine.weight_update = "trainer"']
        return [f"{url} could not be updated and serves nothing: {why}" for url, why in self._failed.items()]

    async def _keep_current(self, control: EngineControl, replica: Replica) -> None:
        resumed, pause_s = False, RETRY_FIRST_S
        while True:
            await asyncio.sleep(CHECK_S)
            policy, label = self._trainer.state.policy, replica.label
            if label is None or policy is None or policy.weights is None:
                continue
            if label.text == label_of(policy.version, self._run) and not self._weights.abandoned.held_by(replica):
                if not resumed:  # an orchestrator may have been killed between loading and resuming
                    resumed = await self._resume(control, replica)
                continue
            if await self._update(control, replica, policy):
                resumed, pause_s = True, RETRY_FIRST_S
            else:
                await pause_or_return(replica, pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)

    async def _update(self, control: EngineControl, replica: Replica, policy: PublishedPolicy) -> bool:
        assert policy.weights is not None
        limit_s = self._settings.weight_update_timeout_s
        try:
            await control.load(
                replica.url, weights=policy.weights, version=policy.version, run=self._run, timeout_s=limit_s
            )
        except InfrastructureFailure as error:
            self._failed[replica.url] = f"version {policy.version} from {policy.weights}: {error}"
            logger.warning("action=update_failed url=%s version=%d error=%s", replica.url, policy.version, error)
        else:
            self._failed.pop(replica.url, None)
            logger.info("action=weights_loaded url=%s version=%d", replica.url, policy.version)
        await replica.polled(within_s=limit_s)
        return replica.url not in self._failed

    async def _resume(self, control: EngineControl, replica: Replica) -> bool:
        try:
            await control.resume(replica.url)
        except (*UNREACHABLE, InfrastructureFailure) as error:
            logger.warning("action=resume_failed url=%s error=%s", replica.url, error)
            return False
        return True


async def pause_or_return(replica: Replica, pause_s: float) -> None:
    """Wait for `pause_s`, or until a replica that did not answer does."""
    was_away, until = False, time.monotonic() + pause_s
    while (left_s := until - time.monotonic()) > 0:
        was_away |= replica.failed_polls > 0
        if was_away and not replica.failed_polls:
            return
        await asyncio.sleep(min(CHECK_S, left_s))
