"""What became of an episode of `verifiers`, read from its traces.

Two traps of the package: an episode that ran out of time comes back ok and scored, and so does one whose harness ended
in peace after the model could not be reached. Neither is a success here.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engines.client import CONTEXT_LIMIT
from penstock.engines.transport import UNREACHABLE
from penstock.environments.verifiers.wire import Answer, Kind

# What the session server refuses because the policy has used up what it may use.
POLICY_LIMITS = (*CONTEXT_LIMIT, "turn limit:", "max_seq_len", "breaks its prefix too often")
# Errors of the package, by name: its own class names are what it records.
PROVIDER = "ProviderError"
OF_THE_INFRASTRUCTURE = {PROVIDER, "SandboxError", "InterceptionError", "TunnelError"}
SETUP_TIMEOUT = "setup_timeout"
CHAINED = re.compile("\n(?:The above exception was|During handling of)")


def answer_of(number: int, episode: Any) -> Answer:
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    failed = _timed_out(episode) or _broken(episode, trained)
    if failed:
        kind, why = failed
        return Answer(number=number, kind=kind, why=why)
    if len(trained) != 1:
        why = (
            f"the episode has {len(trained)} trained traces with a reward each, a rollout has one: let each be a "
            "rollout of its own (rollouts.group_size)"
        )
        return Answer(number=number, kind=Kind.ENVIRONMENT, why=why)
    return _scored(number, trained[0])


def _timed_out(episode: Any) -> tuple[Kind, str] | None:
    """The policy's, but for what was not set up in time, and for others who took part."""
    late = [trace for trace in episode.traces if trace.is_timeout]
    if not late and not episode.is_timeout:
        return None
    why = f"timeout: {', '.join(trace.stop_condition for trace in late) or episode.last_error.message}"
    others = [trace for trace in late if not trace.agent.trainable or trace.stop_condition == SETUP_TIMEOUT]
    return (Kind.INFRASTRUCTURE if others else Kind.POLICY), why


def _broken(episode: Any, trained: Sequence[Any]) -> tuple[Kind, str] | None:
    unanswered = [trace.calls[-1].error for trace in trained if trace.calls and trace.calls[-1].error]
    if not episode.ok:
        errors = [error for trace in episode.traces if not trace.ok for error in trace.errors] + list(episode.errors)
        if not errors:
            return Kind.ENVIRONMENT, "the episode is not ok and has no error"
        return _kind_of(errors[-1], unanswered), _told(errors[-1])
    # A harness that ended in peace may have heeded a limit, and is then judged by what it has. A lost answer is lost.
    lost = [error for error in unanswered if error.type == PROVIDER and not _is_a_limit(error)]
    return (_kind_of(lost[-1], []), f"the last answer was lost: {_told(lost[-1])}") if lost else None


def _kind_of(error: Any, unanswered: Sequence[Any]) -> Kind:
    """A limit is the policy's only where it was the policy that was refused: judges ask models, too."""
    if _is_a_limit(error) and any(error.message == each.message for each in unanswered):
        return Kind.POLICY
    if error.type == PROVIDER and UNREACHABLE in error.message:
        return Kind.UNREACHABLE
    return Kind.INFRASTRUCTURE if error.type in OF_THE_INFRASTRUCTURE else Kind.ENVIRONMENT


def _is_a_limit(error: Any) -> bool:
    return error.status_code in (400, 413) and any(words in error.message.lower() for words in POLICY_LIMITS)


def _told(error: Any) -> str:
    """With the line of code where it began, for who has to mend it."""
    first = CHAINED.split(error.traceback or "")[0]
    places = [line.strip() for line in first.splitlines() if line.strip().startswith('File "')]
    return f"{error.type}: {error.message}" + (f" ({places[-1]})" if places else "")


def _scored(number: int, trace: Any) -> Answer:
    rewards = _numbers({name: reward.value for name, reward in trace.rewards.items() if reward is not None})
    metrics = _numbers({name: value for name, value in trace.metrics.items() if value is not None})
    wrong = [name for name, value in {**rewards, **metrics}.items() if not math.isfinite(value)]
    if wrong:
        return Answer(number=number, kind=Kind.ENVIRONMENT, why=f"{', '.join(wrong)}: not a finite number")
    return Answer(number=number, kind=Kind.SCORED, reward=math.fsum(rewards.values()), rewards=rewards, metrics=metrics)


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items()}
