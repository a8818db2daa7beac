"""What can be said of the adapter where the package is not installed; tests/verifiers has the rest."""

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.config.engine import EnvironmentSettings
from penstock.environments import load_environments
from penstock.environments.verifiers.outcomes import answer_of
from penstock.environments.verifiers.wire import Kind
from penstock.errors import ConfigError


def test_without_the_package_it_says_what_to_install() -> None:
    settings = EnvironmentSettings(use="verifiers", options={"taskset": "gsm8k"})
    with pytest.raises(ConfigError, match=r"\[environments.sums\]: it needs verifiers: pip install 'penstock\[verif"):
        load_environments({"sums": settings})


def test_the_package_is_imported_by_its_own_process_alone() -> None:
    script = "import sys, penstock.environments.verifiers, tasks.playing; print('verifiers' in sys.modules)"
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
    """Of the package's, what is read."""

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


def kind_of(*traces: Trace, **fields: Any) -> Kind:
    return answer_of(0, Episode(list(traces), **fields)).kind


TURN_LIMIT = Error("ProviderError", 'upstream 400: {"error": "turn limit: the session has had its 2 turns"}', 400)
TOO_LARGE_FOR_A_JUDGE = Error("ProviderError", "upstream 400: maximum context length exceeded", 400)
LOST = Error("ProviderError", "upstream 502: broken off", 502)


def failed(error: Error, *calls: Call) -> Trace:
    return Trace(ok=False, errors=[error], calls=list(calls))


def test_what_was_not_scored_is_left_out() -> None:
    answer = answer_of(7, Episode([Trace()]))
    assert (answer.number, answer.kind, answer.reward) == (7, Kind.SCORED, 1.0)
    assert (answer.rewards, answer.metrics) == ({"right": 1.0}, {"length": 3.0})


def test_agents_that_are_not_trained_do_not_score() -> None:
    judge = Trace(agent=Agent(trainable=False), rewards={"right": Reward(5.0)})
    assert answer_of(0, Episode([Trace(), judge])).reward == 1.0


def test_two_that_are_trained_have_no_reward_in_common() -> None:
    assert kind_of(Trace(), Trace()) is Kind.ENVIRONMENT
    assert kind_of() is Kind.ENVIRONMENT


@pytest.mark.parametrize(
    ("trace", "kind"),
    [
        (failed(TURN_LIMIT, Call(TURN_LIMIT)), Kind.POLICY),
        (failed(TOO_LARGE_FOR_A_JUDGE, Call()), Kind.INFRASTRUCTURE),
        (failed(LOST, Call(LOST)), Kind.INFRASTRUCTURE),
        (failed(Error("SandboxError", "no space left")), Kind.INFRASTRUCTURE),
        (failed(Error("TunnelError", "refused")), Kind.INFRASTRUCTURE),
        (failed(Error("TaskError", "KeyError: 'answer'")), Kind.ENVIRONMENT),
        (failed(Error("ToolsetError", "no such server")), Kind.ENVIRONMENT),
    ],
)
def test_errors_by_their_kind(trace: Trace, kind: Kind) -> None:
    assert kind_of(trace) is kind


def test_a_harness_may_heed_a_limit_and_be_scored_but_not_a_lost_answer() -> None:
    assert kind_of(Trace(calls=[Call(), Call(TURN_LIMIT)])) is Kind.SCORED
    assert kind_of(Trace(calls=[Call(LOST), Call()])) is Kind.SCORED
    assert kind_of(Trace(calls=[Call(), Call(LOST)])) is Kind.INFRASTRUCTURE


def test_a_time_out_of_somebody_else_is_not_the_policys() -> None:
    late_judge = Trace(agent=Agent(trainable=False), is_timeout=True, stop_condition="agent_timeout")
    assert kind_of(Trace(), late_judge) is Kind.INFRASTRUCTURE
    assert kind_of(Trace(is_timeout=True, stop_condition="setup_timeout")) is Kind.INFRASTRUCTURE
    assert kind_of(Trace(is_timeout=True, stop_condition="agent_timeout")) is Kind.POLICY


def test_an_episode_that_failed_without_a_word_is_a_bug() -> None:
    assert kind_of(Trace(ok=False)) is Kind.ENVIRONMENT


def test_a_time_out_of_the_whole_episode_is_the_policys() -> None:
    late = Error("TimeoutError", "run() exceeded its 5s deadline")
    assert kind_of(Trace(), errors=[late], is_timeout=True) is Kind.POLICY
