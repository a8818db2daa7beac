"""Real agents, each a small program over its package, and what a session records of them.

An agent plays the steps that its task lists; the scripted engine answers them with thoughts and calls.
"""

import asyncio
import json
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headpond.environments import AgentPolicy, run_program
from headpond.store.base import BlobRef
from headpond.store.columns import read_columns
from support.documents import ROOT
from support.session_process import Agent, SessionsProcess
from support.stores import directory_store

NODE = ".venv-agents-node"
PROGRAMS = ROOT / "tests" / "agents" / "programs"
Step = dict[str, Any]
LOOKS: tuple[Step, ...] = (
    {"think": "North first, I guess.", "say": "I look north.", "call": [["look", {"place": "north", "times": 2}]]},
    {
        "think": "Nothing there: two more places at once.",
        "call": [
            ["look", {"place": "the south \u2013 caf\u00e9", "times": 1}],
            ["look", {"place": "east", "times": 3}],
        ],
    },
    {"think": "One is left,\nthe west.", "say": "Now west.", "call": [["look", {"times": 1, "place": "west"}]]},
    {"think": "That was all.", "say": "I found nothing."},
)


@dataclass(frozen=True, kw_only=True)
class RealAgent:
    name: str
    api: str
    """Chat, Responses or Messages"""
    environment: str
    """directory below the project's, which `make` fills with packages"""
    package: str
    command: Sequence[str]
    """a program of `programs/` and its arguments, or a command of the environment; the task is appended"""
    setting: str
    """what a user sets, beyond the variables of `run_program`; empty: nothing"""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    steps: Sequence[Step] = LOOKS
    samples: int = 1

    @property
    def installed(self) -> Path:
        return ROOT / self.environment

    @property
    def path(self) -> str:
        return f"{self.installed / 'bin'}:{os.environ['PATH']}"

    @property
    def turns(self) -> int:
        return len(self.steps)

    def command_line(self, task: str) -> list[str]:
        first, *others = self.command
        if first.endswith(".py"):
            return [str(self.installed / "bin" / "python"), "-I", str(PROGRAMS / first), *others, task]
        return [shutil.which(first, path=self.path) or first, *others, task]


def task_of(steps: Sequence[Step]) -> str:
    return f"Explore all places. Steps: {json.dumps(steps, ensure_ascii=False)}"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Of a sealed session."""

    turns: int
    samples: int
    breaks: int
    wasted_tokens: int
    repaired_echoes: int
    trained: int
    """tokens with a loss mask"""
    seconds: float
    output: str


def play(agent: RealAgent, server: SessionsProcess, directory: Path, task: str = "") -> Recorded:
    """Run the agent's program in `directory` against a session of its own, and seal that."""
    session, began = server.agent(), time.monotonic()
    output = _run(agent, session, directory, task or task_of(agent.steps))
    seconds = time.monotonic() - began
    response = session.request("POST", "/seal")
    assert response.status == 200, f"{response.body}\n{output[-4000:]}"
    metrics = response.json["metrics"]
    columns = read_columns(directory_store(server.store), BlobRef(**response.json["columns"]))
    return Recorded(
        turns=metrics["turns"],
        samples=metrics["samples"],
        breaks=metrics["breaks"],
        wasted_tokens=metrics["wasted_tokens"],
        repaired_echoes=metrics["repaired_echoes"],
        trained=int((columns.loss_mask != 0).sum()),
        seconds=seconds,
        output=output,
    )


def _run(agent: RealAgent, session: Agent, directory: Path, task: str) -> str:
    """The program's home is its directory: no settings of this machine reach it."""
    directory.mkdir(parents=True, exist_ok=True)
    policy = AgentPolicy(base_url=session.base_url, api_key=session.secret)
    urls = {"BASE_URL": session.base_url, "KEY": session.secret}
    own = {name: _filled(value, urls) for name, value in agent.variables.items()}
    variables = {"HOME": str(directory), "PATH": agent.path, **own}
    command = [_filled(word, urls) for word in agent.command_line(task)]
    ended = asyncio.run(run_program(command, policy, variables=variables, directory=directory))
    assert ended.exit_code == 0, f"{shlex.join(command[:3])} ended with {ended.exit_code}:\n{ended.output[-4000:]}"
    return ended.output


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def version(agent: RealAgent) -> str:
    """As installed; of a Python package by its name, of a package of npm by its file."""
    if agent.environment == NODE:
        described = agent.installed / "node_modules" / agent.package / "package.json"
        return json.loads(described.read_text())["version"]
    wanted = agent.package.replace("-", "_")
    (found,) = (agent.installed / "lib").glob(f"python3*/site-packages/{wanted}-*.dist-info")
    return found.name.removesuffix(".dist-info").rpartition("-")[2]


def table(played: Mapping[str, Recorded], agents: Sequence[RealAgent]) -> list[str]:
    """As docs/agents.md has it."""
    lines = ["| agent | API | turns | samples | breaks | wasted tokens | setting |", "|---|---|---|---|---|---|---|"]
    for agent in agents:
        if found := played.get(agent.name):
            counts = f"{found.turns} | {found.samples} | {found.breaks} | {found.wasted_tokens}"
            lines.append(f"| {agent.name} | {agent.api} | {counts} | {agent.setting or 'none'} |")
    return lines
