import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cli.main import app

# Each costs tens of milliseconds or more: a command takes them when it runs, not when it is explained.
HEAVY = {"celery", "kombu", "redis", "pydantic", "numpy", "orchestrator", "tasks", "workers", "services", "rich"}
MODULES_MOST = 230  # Python itself and typer: 173 with Python 3.11


def explained(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    return result.output


def test_the_help_says_what_there_is() -> None:
    text = explained()
    for command, does in {
        "demo": "Watch rollouts become batches: all of Penstock on this machine.",
        "run": "Drive a run: submit rollouts, form steps, recover what is lost.",
        "status": "Show what a run is doing, and what it waits for.",
        "audit": "Account for every rollout of a run: does it add up?",
        "sessions": "Record what agents say to the policy, each under a URL of its own.",
        "engine": "Answer as an inference server would, without a model.",
        "bench": "Measure one part of Penstock beside its baseline.",
    }.items():
        assert f"{command:<8}  {does}" in text


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("demo", "[OPTIONS]"),
        ("run", "[OPTIONS] [CONFIG.toml]"),
        ("status", "[OPTIONS] {RUN_DIR}"),
        ("audit", "[OPTIONS] {RUN_DIR}"),
    ],
)
def test_each_command_explains_itself(command: str, usage: str) -> None:
    text = explained(command)
    assert f"Usage: root {command} {usage}" in text
    assert "--json" in text
    assert max(map(len, text.splitlines())) <= 80


def test_run_tells_how_to_start_workers_in_lines_to_copy() -> None:
    lines = [line.strip() for line in explained("run").splitlines()]
    assert "celery -A workers.rollouts worker -Q rollouts -c 256" in lines
    assert "celery -A workers.compute worker -Q filtering,advantages,encoding -c 4" in lines


def test_the_help_imports_little() -> None:
    script = "import sys; sys.argv[1:] = ['--help']\nfrom cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    script += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = done.stderr.split()
    assert "Usage:" in done.stdout
    assert not HEAVY & {module.partition(".")[0] for module in modules}
    assert len(modules) <= MODULES_MOST


def test_a_wrong_command_is_said_in_two_lines() -> None:
    result = CliRunner().invoke(app, ["statsu", "/tmp"])
    assert result.exit_code == 2
    assert "No such command 'statsu'" in result.output
