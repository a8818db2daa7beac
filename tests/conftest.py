"""Options of the test suite. The defaults are short; `make chaos` and `make fuzz` run longer."""

import importlib.util
import signal
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job: tests that press Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("support.cluster")

if importlib.util.find_spec("hypothesis"):  # not in the environment of `make test-verifiers`
    from hypothesis import HealthCheck, settings

    # A busy machine decides no test: neither by its speed, nor by examples that differ from run to run.
    settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")

HERE = Path(__file__).parent
LONG = {"bench", "chaos", "commands", "pipeline", "recovery", "workers"}
"""folders of tests that start whole clusters"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-rounds", type=int, default=1, help="random schedules of faults; 200 in `make chaos`")
    parser.addoption("--chaos-faults", type=int, default=3, help="faults of each schedule; 10 in `make chaos`")
    parser.addoption("--chaos-seed", type=int, default=1, help="of the schedules")
    parser.addoption("--chaos-log", type=Path, help="a line for each schedule; those that held are not played again")
    parser.addoption("--fuzz-rounds", type=int, default=40, help="rounds of every fuzz test; 1000 in `make fuzz`")
    parser.addoption("--simulations", type=int, default=15, help="simulated schedules; 1000 in `make simulate`")
    parser.addoption("--simulation-seed", type=int, default=1, help="seed of the first simulated schedule")
    parser.addoption("--simulation-faults", help="numbers of the faults to play, or `none`: replays a schedule")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that the processes of `make test` end together."""
    items.sort(key=lambda item: LONG.isdisjoint(item.path.relative_to(HERE).parts))


@pytest.fixture
def fuzz_rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fuzz-rounds")
