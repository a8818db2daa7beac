"""Versions that the trainer gave up when it resumed from an older checkpoint, while a replica still has them.

Their numbers are used again for other weights. So a replica that still has the old ones serves nothing, until it names
others.
"""

from collections.abc import Sequence

from headpond.engines.control import Replica
from headpond.messages import ABANDONED_LIMIT
from headpond.orchestrator.ledger.ledger import Ledger

ABANDONED = "abandoned_versions"  # key in the ledger: numbers with commas


class AbandonedWeights:
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
        text = str(self._ledger.meta.get(ABANDONED) or "")
        return tuple(map(int, text.split(","))) if text else ()

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
        self._set(sorted(numbers)[-ABANDONED_LIMIT:])

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
            self._set([])

    def held_by(self, replica: Replica) -> str | None:
        """What the replica calls its abandoned weights."""
        return self._held.get(replica.url)

    def _set(self, versions: Sequence[int]) -> None:
        self._ledger.set(ABANDONED, ",".join(map(str, versions)))
