"""Applies the rule of `filters.stale` to the ledger's records, against the newest policy version."""

from headpond.config import RunConfig
from headpond.filters import Mode, is_stale
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import RolloutRecord


class Staleness:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._rule = config.filters.stale
        self._strict = config.trainer.max_steps_ahead == 0
        self._ledger = ledger

    def drops(self, version_first: int) -> bool:
        """Whether a rollout whose lowest version is `version_first` is dropped now. Only mode "drop" drops, and
        `trainer.max_steps_ahead = 0`, which leaves nothing of an older version; and a trainer whose first weights have
        a lower number than those that the engine had."""
        if not self._ledger.state.steps_delivered:
            start = self._ledger.state.start_version
            if self._ledger.state.policy_version < start <= version_first:
                return True
        return (self._strict or self._rule.mode is Mode.DROP) and is_stale(
            version_first=version_first,
            version_now=self._ledger.state.policy_version,
            max_off_policy_steps=0 if self._strict else self._rule.max_off_policy_steps,
        )

    def drops_rollout(self, rollout: RolloutRecord) -> bool:
        return rollout.result is not None and self.drops(rollout.result.version_first)
