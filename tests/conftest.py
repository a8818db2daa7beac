"""Options of the test suite. The defaults are short; `make chaos` and `make fuzz` run longer."""

import pytest

pytest.register_assert_rewrite("support.cluster")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-rounds", type=int, default=1, help="random schedules of faults; 20 in `make chaos`")
    parser.addoption("--fuzz-rounds", type=int, default=40, help="rounds of every fuzz test; 1000 in `make fuzz`")


@pytest.fixture
def fuzz_rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fuzz-rounds")
