"""Real agents with tools and thoughts: one sample each and no break, through the API that each speaks."""

from pathlib import Path

import pytest
from support.documents import ROOT
from support.real_agents import AGENTS, CREWAI, FOUND, NODE, RealAgent, Recorded, play, table
from support.session_process import SessionsProcess

SLOW = {CREWAI, NODE}
"""Environments of `make test-agents-all`."""


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(agent, id=agent.name, marks=[pytest.mark.slow] if agent.environment in SLOW else [])
        for agent in AGENTS
    ],
)
def test_an_agent_is_recorded_as_one_sample(
    agent: RealAgent, sessions: SessionsProcess, home: Path, results: dict[str, Recorded]
) -> None:
    recorded = play(agent, sessions, home)
    results[agent.name] = recorded
    assert FOUND in recorded.output
    counts = (recorded.turns, recorded.samples, recorded.breaks)
    assert counts == (agent.turns, agent.samples, agent.samples - 1), recorded.output[-2000:]
    assert (recorded.wasted_tokens == 0) == (agent.samples == 1)
    assert recorded.trained > 50 * agent.turns, "thoughts are trained on too"


def test_the_page_has_the_table_of_this_run(results: dict[str, Recorded]) -> None:
    """Lines of agents that were not played now are not compared."""
    page = (ROOT / "docs" / "agents.md").read_text().splitlines()
    missing = [line for line in table(results, AGENTS) if line not in page]
    assert not missing, "\n".join(missing)
