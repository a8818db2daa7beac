"""The result of sealing a session: its blobs, and numbers about them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.recording.sample_tree import SampleTree
from penstock.replica_use import ReplicaUse
from penstock.store import BlobRef
from penstock.turn import HIT_MAX_TOKENS


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A recorded rollout."""

    columns: BlobRef
    experts: BlobRef | None
    """None if no routed rows were received."""
    sample_lengths: tuple[int, ...]
    turns: int
    prompt_tokens: int
    """Of the turns that started a sample."""
    completion_tokens: int
    version_first: int
    """The lowest policy version that may have sampled one of its tokens."""
    version_last: int
    """The highest one."""
    truncated: bool
    hit_max_tokens: bool = False
    """Whether a limit of tokens ended the last turn."""
    metrics: Mapping[str, float]
    inexact_tokens: int = 0
    """Completion tokens whose version is a range, or was not said by the engine."""
    agents: Mapping[str, int] = field(default_factory=dict[str, int])
    """Completion tokens of each agent that the environment named, in the order of their first turns."""
    replica_uses: Mapping[str, ReplicaUse] = field(default_factory=dict[str, ReplicaUse])
    """What a session server's chats used of each replica of the engine."""


SaveSealed = Callable[[Sealed], None]
"""Called in a thread, once the blobs are written."""


def sealed_rollout(tree: SampleTree, columns: BlobRef, experts: BlobRef | None) -> Sealed:
    turns = tree.turns
    return Sealed(
        columns=columns,
        experts=experts,
        sample_lengths=tuple(tree.lengths()),
        turns=len(turns),
        prompt_tokens=tree.prompt_tokens(),
        completion_tokens=sum(len(turn.completion_ids) for turn in turns),
        version_first=min(turn.version_first for turn in turns),
        version_last=max(turn.version_last for turn in turns),
        truncated=any(turn.truncated for turn in turns),
        hit_max_tokens=turns[-1].finish_reason == HIT_MAX_TOKENS,
        metrics=tree.metrics(),
        inexact_tokens=tree.inexact_tokens(),
        agents=tree.tokens_by_agent(),
    )
