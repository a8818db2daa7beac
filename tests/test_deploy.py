"""Alerts, the Grafana dashboard and the Slurm script name what exists."""

import json
import re
import subprocess

import yaml
from support.documents import ROOT, Page

SERIES = re.compile(r"headpond_[a-z_0-9]+")


def documented() -> set[str]:
    """The series of docs/metrics.md, with the short forms `_solved_rate` and `headpond_last_step_…` spelled out."""
    table = (ROOT / "docs" / "metrics.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| `headpond_")]
    names = {name for row in rows for name in SERIES.findall(row)}
    (last,) = [row for row in rows if "headpond_last_step_" in row]
    return names | {f"headpond_last_step_{name}" for name in re.findall(r"`([a-z_]+)`", last)}


def test_alerts_ask_for_series_that_exist() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"][0]["rules"]
    named = {name for rule in rules for name in SERIES.findall(rule["expr"])}
    assert len(named) >= 5
    assert named <= documented()
    assert all(rule["annotations"]["summary"] for rule in rules)


def test_panels_ask_for_series_that_exist() -> None:
    panels = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
    named = {name for panel in panels for target in panel["targets"] for name in SERIES.findall(target["expr"])}
    assert len(panels) == 8
    assert named <= documented()


def test_the_slurm_script_is_a_script_whose_commands_exist() -> None:
    path = ROOT / "examples" / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    commands = re.findall(r"^\s*(headpond .+?)(?: \\| &)?$", path.read_text(), re.MULTILINE)
    assert {command.split()[1] for command in commands} == {"redis", "up"}
    flags = {word for command in commands for word in command.split() if word.startswith("--")}
    commands_of = ROOT / "headpond" / "commands"
    known = (commands_of / "up.py").read_text() + (commands_of / "redis_server.py").read_text()
    assert all(flag.removeprefix("--").replace("-", "_") in known for flag in flags)
    assert "examples/slurm.sh" in Page(ROOT / "docs" / "operations.md").text
