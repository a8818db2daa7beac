import pytest
from pydantic import ValidationError

from headpond.batches.manifest import AGENT_CHARACTERS
from headpond.records.rollout import (
    AGENTS_LIMIT,
    METRICS_LIMIT,
    NAME_CHARACTERS,
    POLICY_ERROR_CHARACTERS,
    REWARDS_LIMIT,
    SAMPLES_LIMIT,
    RolloutResult,
)
from headpond.store import BlobRef
from headpond.tasks.stage import Outcome, Reply

EXECUTION = "rollouts/0123456789abcdef/g000123-07/12.0123456789ab"


def named(count: int, value: float) -> dict[str, float]:
    return {f"{number:02d}".ljust(NAME_CHARACTERS, "x"): value for number in range(count)}


def test_the_longest_reply_of_a_rollout_stays_below_the_limit() -> None:
    """A reply has a whole result or an error, never both."""
    result = RolloutResult(
        reward=-0.12345678901234567,
        rewards=named(REWARDS_LIMIT, -0.12345678901234567),
        policy_error="e" * POLICY_ERROR_CHARACTERS,
        columns=BlobRef(key=f"{EXECUTION}/columns.safetensors", size=10**12, checksum="0" * 16),
        experts=BlobRef(key=f"{EXECUTION}/experts.safetensors", size=10**12, checksum="0" * 16),
        sample_lengths=(1_000_000,) * SAMPLES_LIMIT,
        version_first=1_000_000,
        version_last=1_000_000,
        turns=10_000,
        prompt_tokens=10**9,
        tool_tokens=10**9,
        completion_tokens=10**9,
        truncated=True,
        agents={name[:AGENT_CHARACTERS]: 10**9 for name in named(AGENTS_LIMIT, 0.0)},
        metrics=named(METRICS_LIMIT, -1.23457e-05),
    )
    reply = Reply(
        stage="play",
        run="0123456789abcdef",
        job="g000123-07",
        attempt=12,
        execution="0123456789ab",
        worker="a-host-with-a-rather-long-name.example-1234567",
        node="rollouts-1234567@a-host-with-a-rather-long-name.example",
        settings="0123456789abcdef",
        outcome=Outcome.DONE,
        result=result,
        duration_s=12345.123456,
    )
    text = reply.model_dump_json()
    assert len(text) <= 4864
    assert Reply.model_validate_json(text) == reply


@pytest.mark.parametrize(
    "wrong",
    [
        {"sample_lengths": (1,) * (SAMPLES_LIMIT + 1)},
        {"metrics": named(METRICS_LIMIT + 1, 0.0)},
        {"rewards": named(REWARDS_LIMIT + 1, 0.0)},
        {"metrics": {"x" * (NAME_CHARACTERS + 1): 0.0}},
        {"reward": float("nan")},
    ],
)
def test_results_beyond_their_limits_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RolloutResult.model_validate({"reward": 0.0, **wrong})
