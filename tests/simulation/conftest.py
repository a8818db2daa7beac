import pytest

from simulation.playing import SUMMARY


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "simulation_seed" in metafunc.fixturenames:
        first: int = metafunc.config.getoption("--simulation-seed")
        number: int = metafunc.config.getoption("--simulations")
        metafunc.parametrize("simulation_seed", range(first, first + number))


@pytest.fixture
def only_faults(request: pytest.FixtureRequest) -> list[int] | None:
    numbers: str | None = request.config.getoption("--simulation-faults")
    return None if numbers is None else [int(each) for each in numbers.split(",") if each.isdigit()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (played := config.stash.get(SUMMARY, None)) is not None:
        terminalreporter.write_line(str(played))
