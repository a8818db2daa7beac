"""Reads the result of a `verifiers` episode from its traces: a score, or a failure and its kind.

The package reports two kinds of failed episodes as ok and scored: episodes that ran out of time,
and episodes whose harness exited normally after the model became unreachable. Both count as
failures here.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headpond.engines.dialects.base import CONTEXT_LIMIT
from headpond.engines.http.transport import UNREACHABLE
from headpond.environments.verifiers.wire import EpisodeResult, Outcome

# Texts of the session server's refusals at a limit of the policy.
POLICY_LIMITS = (*CONTEXT_LIMIT, "turn limit:", "max_seq_len", "breaks its prefix too often")
# The package's error class names, as it records them.
PROVIDER_ERROR = "ProviderError"
INFRASTRUCTURE_ERRORS = {PROVIDER_ERROR, "SandboxError", "InterceptionError", "TunnelError"}
SETUP_TIMEOUT = "setup_timeout"
CHAINED_EXCEPTION = re.compile("\n(?:The above exception was|During handling of)")


def episode_result(number: int, episode: Any) -> EpisodeResult:
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    failure = _timeout(episode) or _failure(episode, trained)
    if failure:
        outcome, reason = failure
        return EpisodeResult(number=number, outcome=outcome, reason=reason)
    if len(trained) != 1:
        reason = (
            f"the episode has {len(trained)} trained traces with a reward each, but a rollout has one reward: use one "
            "trained agent per episode and play several rollouts (rollouts.group_size)"
        )
        return EpisodeResult(number=number, outcome=Outcome.ENVIRONMENT, reason=reason)
    return _score(number, trained[0])


def _timeout(episode: Any) -> tuple[Outcome, str] | None:
    """Classify a timeout: the policy's failure, except during setup or if the late agent is not
    trained."""
    late = [trace for trace in episode.traces if trace.is_timeout]
    if not late and not episode.is_timeout:
        return None
    reason = f"timeout: {', '.join(trace.stop_condition for trace in late) or episode.last_error.message}"
    excused = [trace for trace in late if not trace.agent.trainable or trace.stop_condition == SETUP_TIMEOUT]
    return (Outcome.INFRASTRUCTURE if excused else Outcome.POLICY), reason


def _failure(episode: Any, trained: Sequence[Any]) -> tuple[Outcome, str] | None:
    last_call_errors = [trace.calls[-1].error for trace in trained if trace.calls and trace.calls[-1].error]
    if not episode.ok:
        errors = [error for trace in episode.traces if not trace.ok for error in trace.errors] + list(episode.errors)
        if not errors:
            return Outcome.ENVIRONMENT, "the episode is not ok and has no error"
        return _classify(errors[-1], last_call_errors), _describe(errors[-1])
    # A harness may stop normally at a limit and is then scored. A lost completion is still a
    # failure.
    lost = [error for error in last_call_errors if error.type == PROVIDER_ERROR and not _is_limit(error)]
    return (_classify(lost[-1], []), f"the last completion was lost: {_describe(lost[-1])}") if lost else None


def _classify(error: Any, last_call_errors: Sequence[Any]) -> Outcome:
    """Classify an error. A limit is the policy's failure only if the policy's own call was
    refused: judges call models, too."""
    if _is_limit(error) and any(error.message == call_error.message for call_error in last_call_errors):
        return Outcome.POLICY
    if error.type == PROVIDER_ERROR and UNREACHABLE in error.message:
        return Outcome.UNREACHABLE
    return Outcome.INFRASTRUCTURE if error.type in INFRASTRUCTURE_ERRORS else Outcome.ENVIRONMENT


def _is_limit(error: Any) -> bool:
    return error.status_code in (400, 413) and any(text in error.message.lower() for text in POLICY_LIMITS)


def _describe(error: Any) -> str:
    """Describe an error with the line of code that raised it."""
    first = CHAINED_EXCEPTION.split(error.traceback or "")[0]
    places = [line.strip() for line in first.splitlines() if line.strip().startswith('File "')]
    return f"{error.type}: {error.message}" + (f" ({places[-1]})" if places else "")


def _score(number: int, trace: Any) -> EpisodeResult:
    rewards = _floats({name: reward.value for name, reward in trace.rewards.items() if reward is not None})
    metrics = _floats({name: value for name, value in trace.metrics.items() if value is not None})
    invalid = [name for name, value in {**rewards, **metrics}.items() if not math.isfinite(value)]
    if invalid:
        reason = f"{', '.join(invalid)}: not a finite number"
        return EpisodeResult(number=number, outcome=Outcome.ENVIRONMENT, reason=reason)
    return EpisodeResult(
        number=number,
        outcome=Outcome.SCORED,
        reward=math.fsum(rewards.values()),
        rewards=rewards,
        metrics=metrics,
    )


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
