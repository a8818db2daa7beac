"""What one rollout used of each replica of the engine, and what the replicas that failed it cost, in tokens."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

REPLICAS_LIMIT = 3  # in one reply: a rollout stays with a replica unless that fails
URL_CHARACTERS = 80

ASKED: ContextVar[list[str] | None] = ContextVar("ASKED", default=None)
"""Replicas that requests of this rollout wait for, the last one last: its lease names it, for `headpond why`."""


@dataclass(kw_only=True)
class ReplicaUse:
    tokens: int = 0
    """sampled in responses that were used"""
    seconds: float = 0.0
    """that these responses took"""
    lost_tokens: int = 0
    """sampled and thrown away, or computed again by another replica, because this one failed"""


class Usage:
    """Of one rollout."""

    def __init__(self) -> None:
        self._uses: dict[str, ReplicaUse] = {}

    def answered(self, url: str, *, tokens: int, seconds: float) -> None:
        use = self._of(url)
        use.tokens += tokens
        use.seconds += seconds

    def lost(self, url: str, tokens: int) -> None:
        if tokens:
            self._of(url).lost_tokens += tokens

    def _of(self, url: str) -> ReplicaUse:
        return self._uses.setdefault(url[:URL_CHARACTERS], ReplicaUse())

    @property
    def by_replica(self) -> Mapping[str, ReplicaUse]:
        """The costliest and most used ones, as a reply may carry them."""
        ordered = sorted(self._uses.items(), key=lambda item: (-item[1].lost_tokens, -item[1].tokens))
        return {
            url: ReplicaUse(tokens=use.tokens, seconds=round(use.seconds, 3), lost_tokens=use.lost_tokens)
            for url, use in ordered[:REPLICAS_LIMIT]
        }
