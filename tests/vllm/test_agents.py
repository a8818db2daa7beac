"""Real agents in front of a real vLLM, tokens in and tokens out: one sample each and no break."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.real_agents import PYTHON, RealAgent, play
from support.session_process import SessionsProcess, running
from support.vllm_server import AnyEngine

QUESTIONS = ["What is 3 plus 4?", "Think, then say something.", "What is 21 plus 8?", "Say something, 5."]
SETTINGS = """\
[engine]
dialect = "generate"

[policy]
max_seq_len = 4096

[sessions]
forced = { max_tokens = 96, temperature = 0.3 }
"""


@pytest.fixture
def sessions(engine: AnyEngine, tokenizer: str, tmp_path: Path) -> Iterator[SessionsProcess]:
    (tmp_path / "agents.toml").write_text(SETTINGS)
    with running(tmp_path, engine.url, "agents.toml", "--policy-renderer", tokenizer, "--mode", "open") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "api"), [("openai", "Chat"), ("anthropic", "Messages"), ("langgraph", "Chat")])
def test_an_agent_is_recorded_as_one_sample(kind: str, api: str, sessions: SessionsProcess, tmp_path: Path) -> None:
    command = ["conversations.py", kind]
    agent = RealAgent(name=kind, api=api, environment=PYTHON, package=kind, command=command, setting="")
    recorded = play(agent, sessions, tmp_path / "home", json.dumps(QUESTIONS))
    assert recorded.turns >= len(QUESTIONS)
    assert (recorded.samples, recorded.breaks, recorded.wasted_tokens) == (1, 0, 0)
    assert recorded.trained >= recorded.turns
