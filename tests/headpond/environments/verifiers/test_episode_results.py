"""Tests of the adapter that run without the package `verifiers`; tests/verifiers has the others."""

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from headpond.config.engine import EnvironmentSettings
from headpond.environments import load_environments
from headpond.environments.verifiers.episode_results import episode_result
from headpond.environments.verifiers.wire import Outcome
from headpond.errors import ConfigError


def test_a_missing_package_error_names_the_extra_to_install() -> None:
    settings = EnvironmentSettings(use="verifiers", options={"taskset": "gsm8k"})
    with pytest.raises(ConfigError, match=r"\[environments.sums\]: .*verifiers.* pip install"):
        load_environments({"sums": settings})


def test_only_the_child_process_imports_the_package() -> None:
    script = "import sys, headpond.environments.verifiers, headpond.tasks.player; print('verifiers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


@dataclass
class Error:
    type: str
    message: str
    status_code: int | None = None
    traceback: str | None = None


@dataclass
class Call:
    error: Error | None = None


@dataclass
class Agent:
    trainable: bool = True


@dataclass
class Reward:
    value: float


@dataclass
class Trace:
    """The fields of the package's trace that are read."""

    ok: bool = True
    errors: list[Error] = field(default_factory=list[Error])
    calls: list[Call] = field(default_factory=lambda: [Call()])
    agent: Agent = field(default_factory=Agent)
    rewards: dict[str, Reward | None] = field(default_factory=lambda: {"right": Reward(1.0), "not_reached": None})
    metrics: dict[str, float | None] = field(default_factory=lambda: {"length": 3.0, "not_reached": None})
    is_timeout: bool = False
    stop_condition: str = "agent_completed"


@dataclass
class Episode:
    traces: list[Trace]
    errors: list[Error] = field(default_factory=list[Error])
    is_timeout: bool = False

    @property
    def ok(self) -> bool:
        return not self.errors and all(trace.ok for trace in self.traces)

    @property
    def last_error(self) -> Error:
        return self.errors[-1]


def outcome_of(*traces: Trace, **fields: Any) -> Outcome:
    return episode_result(0, Episode(list(traces), **fields)).outcome


TURN_LIMIT = Error(
    "ProviderError", 'upstream 400: {"error": {"message": "turn limit: the session has used its 2 turns"}}', 400
)
TOO_LARGE_FOR_A_JUDGE = Error("ProviderError", "upstream 400: maximum context length exceeded", 400)
LOST = Error("ProviderError", "upstream 502: broken off", 502)


def failed(error: Error, *calls: Call) -> Trace:
    return Trace(ok=False, errors=[error], calls=list(calls))


def test_rewards_and_metrics_without_a_value_are_left_out() -> None:
    result = episode_result(7, Episode([Trace()]))
    assert (result.number, result.outcome, result.reward) == (7, Outcome.SCORED, 1.0)
    assert (result.rewards, result.metrics) == ({"right": 1.0}, {"length": 3.0})


def test_rewards_of_untrained_agents_do_not_count() -> None:
    judge = Trace(agent=Agent(trainable=False), rewards={"right": Reward(5.0)})
    assert episode_result(0, Episode([Trace(), judge])).reward == 1.0


def test_an_episode_with_other_than_one_trained_agent_is_refused() -> None:
    assert outcome_of(Trace(), Trace()) is Outcome.ENVIRONMENT
    assert outcome_of() is Outcome.ENVIRONMENT


@pytest.mark.parametrize(
    ("trace", "outcome"),
    [
        (failed(TURN_LIMIT, Call(TURN_LIMIT)), Outcome.POLICY),
        (failed(TOO_LARGE_FOR_A_JUDGE, Call()), Outcome.INFRASTRUCTURE),
        (failed(LOST, Call(LOST)), Outcome.INFRASTRUCTURE),
        (failed(Error("SandboxError", "no space left")), Outcome.INFRASTRUCTURE),
        (failed(Error("TunnelError", "refused")), Outcome.INFRASTRUCTURE),
        (failed(Error("TaskError", "KeyError: 'answer'")), Outcome.ENVIRONMENT),
        (failed(Error("ToolsetError", "no such server")), Outcome.ENVIRONMENT),
    ],
)
def test_errors_are_classified_by_type(trace: Trace, outcome: Outcome) -> None:
    assert outcome_of(trace) is outcome


def test_a_harness_that_stops_at_a_limit_is_scored_but_not_after_a_lost_completion() -> None:
    assert outcome_of(Trace(calls=[Call(), Call(TURN_LIMIT)])) is Outcome.SCORED
    assert outcome_of(Trace(calls=[Call(LOST), Call()])) is Outcome.SCORED
    assert outcome_of(Trace(calls=[Call(), Call(LOST)])) is Outcome.INFRASTRUCTURE


def test_a_timeout_of_setup_or_of_an_untrained_agent_is_not_the_policys() -> None:
    late_judge = Trace(agent=Agent(trainable=False), is_timeout=True, stop_condition="agent_timeout")
    assert outcome_of(Trace(), late_judge) is Outcome.INFRASTRUCTURE
    assert outcome_of(Trace(is_timeout=True, stop_condition="setup_timeout")) is Outcome.INFRASTRUCTURE
    assert outcome_of(Trace(is_timeout=True, stop_condition="agent_timeout")) is Outcome.POLICY


def test_a_failed_episode_without_an_error_is_a_bug_of_the_environment() -> None:
    assert outcome_of(Trace(ok=False)) is Outcome.ENVIRONMENT


def test_a_timeout_of_the_whole_episode_is_the_policys() -> None:
    late = Error("TimeoutError", "run() exceeded its 5s deadline")
    assert outcome_of(Trace(), errors=[late], is_timeout=True) is Outcome.POLICY
