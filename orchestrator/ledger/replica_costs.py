"""What each replica of the engine gave and cost, in tokens: from the workers' replies, counted in the ledger."""

from collections.abc import Mapping
from typing import Any

from headpond.config import RunConfig
from headpond.ledger.state_rows import ReplicaState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.replica_use import URL_CHARACTERS, ReplicaUse

# Counts replicas that a host reaches by a URL of its own (`engine.urls` may differ), so that
# names cannot fill the ledger.
OTHER = "other"
MEASURED_TOKENS = 1_000  # of a replica, before its rate is compared: some ten completions


class ReplicaCosts:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._replicas = ledger.state.replicas
        self._urls = config.engine.urls

    def count(self, uses: Mapping[str, ReplicaUse]) -> None:
        known = {url[:URL_CHARACTERS]: url for url in self._urls}
        for name, use in uses.items():
            replica = self._replicas[known.get(name, OTHER)]
            replica.tokens += use.tokens
            replica.seconds += use.seconds
            replica.lost_tokens += use.lost_tokens

    def status(self) -> dict[str, dict[str, Any]]:
        """By replica, since the run began."""
        replicas = {url: self._replicas[url] for url in self._urls}
        slow = slow_tokens(replicas)
        return {
            url: {
                "tokens": replica.tokens,
                "tokens_per_s": round(replica.tokens / replica.seconds, 1) if replica.seconds else 0.0,
                "lost_tokens": replica.lost_tokens,
                "slow_tokens": slow[url],
            }
            for url, replica in replicas.items()
        }


def slow_tokens(replicas: Mapping[str, ReplicaState]) -> dict[str, int]:
    """By replica: the tokens that its requests would have had in addition at the rate of the fastest replica. An
    estimate: a rate depends on the lengths of prompts too."""
    rates = {url: row.tokens / row.seconds for url, row in replicas.items()
             if row.tokens >= MEASURED_TOKENS and row.seconds}  # fmt: skip
    fastest = max(rates.values(), default=0.0)
    missed = {url: int(fastest * row.seconds - row.tokens) if url in rates else 0 for url, row in replicas.items()}
    return {url: max(0, number) for url, number in missed.items()}
