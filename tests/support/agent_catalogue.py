"""The real agents that are tested, with the setting that each needs."""

from support.real_agents import LOOKS, NODE, RealAgent, Step

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
