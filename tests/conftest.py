import pytest

pytest.register_assert_rewrite("support.cluster")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-rounds", type=int, default=1, help="how many random schedules of faults to play")
