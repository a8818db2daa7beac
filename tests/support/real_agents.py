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
        turns=int(metrics["turns"]),
        samples=int(metrics["samples"]),
        breaks=int(metrics["breaks"]),
        wasted_tokens=int(metrics["wasted_tokens"]),
        repaired_echoes=int(metrics["repaired_echoes"]),
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


PYTHON, CREWAI, LITELLM = ".venv-agents", ".venv-agents-crewai", ".venv-agents-litellm"
FOUND = "I found nothing."


def commands(tool: str, name: str = "command", last: Step | None = None, **more: object) -> list[Step]:
    """Steps of an agent whose tool is a shell."""
    runs = [[tool, {name: f"echo {word}", **more}] for word in ("one", "two", "caf\u00e9")]
    end: Step = last or {"think": "That was all.", "say": FOUND}
    return [
        {"think": "A first look.", "say": "I look.", "call": runs[:1]},
        {"think": "Two more,\nat once.", "call": runs[1:]},
        end,
    ]


SUBMITTED: Step = {
    "think": "That was all.",
    "say": "I submit.",
    "call": [["bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {FOUND}"}]],
}
REPORT: Step = {"think": "That was all.", "say": '{"summary": "I found nothing.", "places": 4}'}
STRUCTURED = [*({name: step[name] for name in ("think", "call")} for step in LOOKS[:-1]), REPORT]
FINAL: Step = {"think": "That was all.", "call": [["final_answer", {"answer": FOUND}]]}
CODE = [
    {"think": "North.", "say": 'Thought: I look.\n<code>\nprint(look("north", 2))\n</code>'},
    {"think": "South.", "say": 'Thought: once more.\n<code>\nprint(look("south", 1))\n</code>'},
    {"think": "Enough.", "say": f'Thought: that is all.\n<code>\nfinal_answer("{FOUND}")\n</code>'},
]
OPENCODE = (
    '{"model": "headpond/policy", "share": "disabled", "provider": {"headpond": {"npm": "@ai-sdk/openai-compatible", '
    '"options": {"baseURL": "{BASE_URL}", "apiKey": "{KEY}"}, "models": {"policy": {"reasoning": true, '
    '"tool_call": true}}}}}'
)
CODEX = 'model_providers.headpond={name="headpond", base_url="{BASE_URL}", env_key="OPENAI_API_KEY"}'


def openai(how: str, api: str, name: str, **more: object) -> RealAgent:
    options: dict[str, object] = {"environment": PYTHON, "package": "openai", "setting": "", **more}
    return RealAgent(name=f"openai, {name}", api=api, command=["openai_sdk.py", how], **options)  # type: ignore[arg-type]


def python(name: str, api: str, *command: str, package: str = "", **more: object) -> RealAgent:
    options: dict[str, object] = {"environment": PYTHON, "setting": "", **more}
    return RealAgent(name=name, api=api, package=package or name, command=command, **options)  # type: ignore[arg-type]


AGENTS = [
    openai("chat", "Chat", "plain"),
    openai("streamed", "Chat", "streamed"),
    openai("structured", "Chat", "structured output", steps=STRUCTURED),
    openai("responses", "Responses", "plain responses"),
    openai("responses_streamed", "Responses", "streamed responses"),
    python("anthropic", "Messages", "anthropic_sdk.py", "messages"),
    python("anthropic, streamed", "Messages", "anthropic_sdk.py", "streamed", package="anthropic"),
    python("openai-agents", "Responses", "openai_agents_sdk.py", "responses", setting="`set_tracing_disabled(True)`"),
    python(
        "openai-agents, chat",
        "Chat",
        "openai_agents_sdk.py",
        "chat",
        package="openai-agents",
        setting='`set_default_openai_api("chat_completions")`',
    ),
    python(
        "pydantic-ai", "Chat", "pydantic_ai_agent.py", "chat", package="pydantic-ai-slim", setting="`OpenAIChatModel`"
    ),
    python(
        "pydantic-ai, responses",
        "Responses",
        "pydantic_ai_agent.py",
        "responses",
        package="pydantic-ai-slim",
        setting="`OpenAIResponsesModel`",
    ),
    python(
        "pydantic-ai, messages",
        "Messages",
        "pydantic_ai_agent.py",
        "messages",
        package="pydantic-ai-slim",
        setting="`AnthropicModel`",
    ),
    python("langgraph", "Chat", "langgraph_agent.py", setting="`ChatOpenAI` of langchain-openai"),
    python(
        "autogen",
        "Chat",
        "autogen_agent.py",
        package="autogen-agentchat",
        setting="`OpenAIChatCompletionClient(base_url=, model_info=)`",
    ),
    python(
        "smolagents, tools",
        "Chat",
        "smolagents_agent.py",
        "tools",
        package="smolagents",
        setting="`OpenAIModel(api_base=)`",
        steps=[*LOOKS[:2], FINAL],
        samples=3,
    ),
    python(
        "smolagents, code",
        "Chat",
        "smolagents_agent.py",
        "code",
        package="smolagents",
        setting="`OpenAIModel(api_base=)`",
        steps=CODE,
        samples=3,
    ),
    python(
        "litellm",
        "Chat",
        "litellm_sdk.py",
        environment=LITELLM,
        setting="`openai/` before the model, `api_base=`; offline `LITELLM_LOCAL_MODEL_COST_MAP=True`",
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    python(
        "mini-swe-agent",
        "Chat",
        "mini_swe_agent.py",
        environment=LITELLM,
        setting="as litellm, in `model_kwargs`; `MSWEA_CONFIGURED=true`",
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1"},
        steps=commands("bash", last=SUBMITTED),
    ),
    python(
        "crewai",
        "Chat",
        "crewai_crew.py",
        environment=CREWAI,
        setting="`LLM(base_url=)`; offline `CREWAI_DISABLE_TELEMETRY=true`, `CREWAI_TRACING_ENABLED=false`",
        variables={
            "CREWAI_DISABLE_TELEMETRY": "true",
            "OTEL_SDK_DISABLED": "true",
            "CREWAI_TRACING_ENABLED": "false",
        },
    ),
    RealAgent(
        name="Claude Code",
        api="Messages",
        environment=NODE,
        package="@anthropic-ai/claude-code",
        command=["claude", "--print", "--allowedTools", "Bash", "--model", "policy", "--"],
        variables={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1"},
        setting="`claude --print --model policy`; offline `CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1`",
        steps=commands("Bash", description="Say a word"),
    ),
    RealAgent(
        name="codex",
        api="Responses",
        environment=NODE,
        package="@openai/codex",
        command=[
            *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *("-c", "model=policy", "-c", "model_provider=headpond", "-c", CODEX, "--"),
        ],
        setting='`codex exec -c model=policy -c model_provider=headpond -c model_providers.headpond={name="headpond", '
        'base_url="...", env_key="OPENAI_API_KEY"}`',
        steps=commands("exec_command", "cmd"),
    ),
    RealAgent(
        name="qwen-code",
        api="Chat",
        environment=NODE,
        package="@qwen-code/qwen-code",
        command=["qwen", "--auth-type", "openai", "--model", "policy", "--yolo", "--prompt"],
        setting="`qwen --auth-type openai --model policy`",
        steps=commands("run_shell_command", is_background=False),
    ),
    RealAgent(
        name="opencode",
        api="Chat",
        environment=NODE,
        package="opencode-ai",
        command=["sh", "-c", 'printf %s "$0" | exec opencode run'],  # an argument with spaces would be quoted
        variables={
            "OPENCODE_CONFIG_CONTENT": OPENCODE,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        setting="a provider of `@ai-sdk/openai-compatible` in `opencode.json`; its titles in `sessions.leave_out`; "
        "offline `OPENCODE_DISABLE_MODELS_FETCH=1`",
        steps=commands("bash", description="Say a word"),
    ),
]
