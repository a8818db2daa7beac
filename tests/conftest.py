"""Options of the test suite. The defaults are short; `make chaos` and `make fuzz` run longer."""

import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job: tests that press Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("support.cluster")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-rounds", type=int, default=1, help="random schedules of faults; 20 in `make chaos`")
    parser.addoption("--fuzz-rounds", type=int, default=40, help="rounds of every fuzz test; 1000 in `make fuzz`")


@pytest.fixture
def fuzz_rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fuzz-rounds")
