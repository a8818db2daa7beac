"""The schedules of a run of the tests, and the sum of their log at its end."""

from pathlib import Path

import pytest
from support.chaos import log
from support.chaos.draw import schedules


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Schedules that the log has as held are not played again."""
    if "schedule" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    drawn = schedules(option("--chaos-seed"), option("--chaos-rounds"), option("--chaos-faults"))
    path: Path | None = option("--chaos-log")
    lines = log.read(path) if path else {}
    held = {(key, tuple(sorted(line["faults"]))) for key, line in lines.items() if line["result"] == log.HELD}
    left = [each for each in drawn if ((each.seed, each.number), tuple(sorted(each.faults))) not in held]
    metafunc.parametrize("schedule", left, ids=lambda schedule: f"{schedule.number}-{schedule.world}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path: Path | None = config.getoption("--chaos-log")
    if path and path.exists():
        terminalreporter.section("faults")
        for line in log.table(path):
            terminalreporter.write_line(line)
