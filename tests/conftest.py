"""Options of the test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-rounds", type=int, default=40, help="rounds of every fuzz test; the long version has 4000")


@pytest.fixture
def fuzz_rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fuzz-rounds")
