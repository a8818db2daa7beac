"""Which weights may serve the jobs that are submitted now, as far as replicas report theirs.

Jobs carry `least_version`, and workers send nothing to a replica with older weights. `ReplicaWatch` raises it.
"""

from collections.abc import Sequence

from headpond.config import RunConfig
from headpond.engines.replicas.control import START_VERSION, Replica
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.tasks.stages.play import ABANDONED_LIMIT


class AbandonedWeights:
    """Versions that the trainer gave up when it resumed from an older checkpoint, while a replica still has them.

    Their numbers are used again for other weights: a replica that has the old ones serves nothing meanwhile.
    """

    def __init__(self, ledger: Ledger, replicas: Sequence[Replica]) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self._held: dict[str, str] = {}  # replica -> what it calls the abandoned weights
        # replicas that have not yet said what they have
        self._unasked = {replica.url for replica in replicas} if self.versions else set[str]()

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


class ServingWeights:
    def __init__(self, config: RunConfig, ledger: Ledger, replicas: Sequence[Replica] = ()) -> None:
        # whether versions are what replicas report
        self.reported = config.engine.versions == "reported"
        self.strict = config.trainer.max_steps_ahead == 0
        self._ledger = ledger
        self.replicas = replicas
        self.abandoned = AbandonedWeights(ledger, replicas)

    @property
    def least_version(self) -> int:
        """Of the weights that may serve a job that is submitted now."""
        if not self.reported:
            return START_VERSION
        state = self._ledger.state
        return state.policy_version if self.strict else state.least_version

    def served_version(self) -> int:
        """Return the newest version that every replica has, as far as they report it."""
        if not self.reported or not any(replica.answers for replica in self.replicas):
            return self._ledger.state.policy_version
        return self._ledger.state.least_version

    def may_begin(self, step: int) -> bool:
        """Whether rollouts of `step` may begin. With `max_steps_ahead = 0`, every replica that serves must have the
        version that the step before was trained into."""
        if not self.strict:
            return True
        first = self._ledger.state.steps_delivered + len(self._ledger.batches)
        return step <= first and self.awaited(step) is None

    def awaited(self, step: int) -> str | None:
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
            for replica in self.replicas
            if replica.answers and not replica.failed_polls and not self.has(replica, version)
        ]
        if behind:
            return f"step {step} begins when every replica has version {version}: {', '.join(behind)} has not"
        return None

    def has(self, replica: Replica, version: int) -> bool:
        label = replica.label
        named = label is not None and (label.numbered or version == START_VERSION)
        if label is None or label.unfit or self.abandoned.held_by(replica):
            return False
        return named and label.version >= version
