"""One rollout's use of each replica of the engine, and the cost in tokens of replicas that
failed it."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

REPLICAS_LIMIT = 3  # Most replicas in one reply. A rollout leaves its replica only if that fails.
URL_CHARACTERS = 80

# Replicas that requests of this rollout wait for, the newest last. The rollout's lease names that
# one, for `headpond why`.
ASKED: ContextVar[list[str] | None] = ContextVar("ASKED", default=None)


@dataclass(kw_only=True)
class ReplicaUse:
    tokens: int = 0  # Tokens sampled in responses that were used.
    seconds: float = 0.0  # Duration of these responses.
    # Tokens sampled and thrown away, or computed again by another replica, because this one
    # failed.
    lost_tokens: int = 0


class Usage:
    """The replicas that one rollout used."""

    def __init__(self) -> None:
        self._uses: dict[str, ReplicaUse] = {}

    def answered(self, url: str, *, tokens: int, seconds: float) -> None:
        use = self._use_of(url)
        use.tokens += tokens
        use.seconds += seconds

    def lost(self, url: str, tokens: int) -> None:
        if tokens:
            self._use_of(url).lost_tokens += tokens

    def _use_of(self, url: str) -> ReplicaUse:
        return self._uses.setdefault(url[:URL_CHARACTERS], ReplicaUse())

    @property
    def by_replica(self) -> Mapping[str, ReplicaUse]:
        """The costliest and most used replicas: few enough for a reply."""
        ordered = sorted(self._uses.items(), key=lambda item: (-item[1].lost_tokens, -item[1].tokens))
        return {
            url: ReplicaUse(tokens=use.tokens, seconds=round(use.seconds, 3), lost_tokens=use.lost_tokens)
            for url, use in ordered[:REPLICAS_LIMIT]
        }
