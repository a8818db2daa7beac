"""The reply of an execution, by how its body ended."""

import asyncio
from typing import Any

import pytest

from penstock.errors import EngineUnreachable, InfrastructureFailure, PolicyFailure
from penstock.messages import ERROR_CHARACTERS, FilterJob, Outcome, Reply, RolloutJob, RolloutResult
from tasks.execution import Execution

COMMON: dict[str, Any] = {"run": "r", "job": "g0000001-0", "attempt": 1, "sequence": 1, "timeout_s": 1.0}
ROLLOUT = RolloutJob(**COMMON, group="g0000001", environment="noop", example=0, seed=0)
FILTER = FilterJob(**COMMON, plan="plans/a.json")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InfrastructureFailure("sandbox down"), Outcome.FAILED),
        (ValueError("a bug"), Outcome.FAILED),
        (EngineUnreachable("refused"), Outcome.UNREACHABLE),
        (asyncio.CancelledError("stopping"), Outcome.RELEASED),
        (SystemExit("stopping"), Outcome.RELEASED),
        (PolicyFailure("context limit"), Outcome.DONE),
        (TimeoutError(), Outcome.DONE),
    ],
)
def test_a_rollouts_error_decides_the_outcome(error: BaseException, outcome: Outcome) -> None:
    reply = Execution(job=ROLLOUT, worker="w").failed(error)
    assert reply.outcome is outcome
    assert (reply.result is not None) == (outcome is Outcome.DONE)


def test_a_policy_failure_is_a_result_with_a_reward() -> None:
    reply = Execution(job=ROLLOUT, worker="w").failed(PolicyFailure("context limit"))
    assert reply.result == RolloutResult(reward=0.0, policy_error="PolicyFailure")


def test_a_stage_that_times_out_has_failed() -> None:
    assert Execution(job=FILTER, worker="w").failed(TimeoutError()).outcome is Outcome.FAILED


def test_a_long_error_is_shortened_and_survives_the_wire() -> None:
    reply = Execution(job=ROLLOUT, worker="w").failed(ValueError("x" * 10_000))
    assert len(reply.error or "") == ERROR_CHARACTERS
    assert Reply.model_validate_json(reply.model_dump_json()) == reply


def test_two_executions_of_one_message_hold_two_leases() -> None:
    leases = {Execution(job=ROLLOUT, worker="w").lease for _ in range(2)}
    assert len(leases) == 2
    assert all(lease.startswith("r.g0000001-0.1.") for lease in leases)
