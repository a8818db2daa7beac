"""The result of a rollout, as its reply carries it and the ledger keeps it, with the limits of every field."""

from typing import Annotated

from pydantic import Field, FiniteFloat

from headpond import ids
from headpond.batches.manifest import AGENT_CHARACTERS
from headpond.records.wire import Result
from headpond.replica_use import REPLICAS_LIMIT, URL_CHARACTERS, ReplicaUse
from headpond.store import BlobRef
from headpond.store.base import is_key

ROLLOUT_REPLY_BYTES = 4864  # of a rollout's reply with as many metrics, samples and names as it may have
METRICS_LIMIT = 37
REWARDS_LIMIT = 8
AGENTS_LIMIT = 4
SAMPLES_LIMIT = 128  # of one rollout; a step is packed by their lengths, before any token is read
POLICY_ERROR_CHARACTERS = 120
NAME_CHARACTERS = 32

Name = Annotated[str, Field(max_length=NAME_CHARACTERS)]
ReplicaUses = Annotated[
    dict[Annotated[str, Field(max_length=URL_CHARACTERS)], ReplicaUse], Field(max_length=REPLICAS_LIMIT)
]  # Replica of the engine -> what the rollout used of it, and what its failures cost.
AgentName = Annotated[str, Field(max_length=AGENT_CHARACTERS)]


class Recorded(Result):
    """A recorded rollout, as sealing returns it: blobs, lengths, versions and counts."""

    columns: BlobRef | None = None  # None only if there is nothing to train on
    experts: BlobRef | None = None  # None if the engine sent no routed experts
    # tokens of each sample
    sample_lengths: Annotated[tuple[int, ...], Field(max_length=SAMPLES_LIMIT)] = ()
    version_first: int = 0  # lowest policy version that may have sampled one of its tokens
    version_last: int = 0  # the highest one
    # completion tokens whose version is a range, or was not reported by the engine
    inexact_tokens: int = 0
    turns: int = 0
    prompt_tokens: int = 0  # in the prompts of the turns that began a sample
    tool_tokens: int = 0  # in later context: messages of tools and users between the turns
    completion_tokens: int = 0
    truncated: bool = False
    # whether a limit of tokens ended the last turn: `max_tokens`, or the engine's context
    # length
    hit_max_tokens: bool = False
    # completion tokens of the first agents that the environment named, in the order of their
    # first turns
    agents: Annotated[dict[AgentName, int], Field(max_length=AGENTS_LIMIT)] = {}
    metrics: Annotated[dict[Name, FiniteFloat], Field(max_length=METRICS_LIMIT)] = {}
    # sent in the reply: the ledger does not keep it with the rollout
    replica_uses: Annotated[ReplicaUses, Field(exclude=True)] = {}


class RolloutResult(Recorded):
    """The score and the recording. `metrics` are those of both."""

    reward: FiniteFloat
    # named parts of the reward
    rewards: Annotated[dict[Name, FiniteFloat], Field(max_length=REWARDS_LIMIT)] = {}
    agent_rewards: Annotated[dict[AgentName, FiniteFloat], Field(max_length=AGENTS_LIMIT)] = {}
    # failure caused by the policy (time-out, context limit, ...): scored, in the baseline,
    # never retried
    policy_error: Annotated[str, Field(max_length=POLICY_ERROR_CHARACTERS)] | None = None
    # key of the file with a value for each turn, beside `columns`; set when the group phase
    # is done
    credit: str | None = None

    @property
    def keys(self) -> list[str]:
        return [blob.key for blob in (self.columns, self.experts) if blob] + ([self.credit] if self.credit else [])

    def names_only_files_of(self, execution: ids.LeaseId) -> bool:
        directory = ids.execution_directory(*execution)
        return all(is_key(key) and key.rpartition("/")[0] == directory for key in self.keys)

    @property
    def stored_bytes(self) -> int:
        return sum(blob.size for blob in (self.columns, self.experts) if blob)
