"""Options of the test suite: the short versions run with everything, the long ones have their own make target."""

import pytest

pytest.register_assert_rewrite("support.cluster")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-rounds", type=int, default=1, help="random schedules of faults to play; `make chaos`: 20")
    parser.addoption("--fuzz-rounds", type=int, default=40, help="rounds of every fuzz test; `make fuzz`: 4000")


@pytest.fixture
def fuzz_rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fuzz-rounds")
