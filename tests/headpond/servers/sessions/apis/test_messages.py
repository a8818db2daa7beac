"""The Messages API on the wire: what Claude Code and the package `anthropic` send, and what they get."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.session_process import Agent, HttpResponse, Script, SessionsProcess, running
from support.upstream import Response, answer, calling, tool_call

PATH = "/v1/messages?beta=true"
TEXT = {"type": "text", "text": "a"}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "x"}


def ask(agent: Agent, content: Any, **fields: Any) -> HttpResponse:
    messages = content if isinstance(content, list) and "role" in content[0] else [{"role": "user", "content": content}]
    return agent.request("POST", PATH, {"model": "policy", "max_tokens": 50, "messages": messages, **fields})


def events(response: HttpResponse) -> list[tuple[str, Any]]:
    parts = [part.split("\n") for part in response.body.decode().strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def test_a_response_is_a_message(agent: Agent, script: Script) -> None:
    response = ask(agent, "hello", stop_sequences=["END"], temperature=0.5, metadata={"user_id": "u"})
    assert response.status == 200
    message = response.json
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "end_turn")
    assert message["content"] == [{"type": "text", "text": "answer 1 to hello"}]
    assert message["usage"]["output_tokens"] == len("answer 1 to hello")
    sent = script.received("hello")[-1].body
    assert (sent["max_tokens"], sent["stop"], sent["temperature"]) == (50, ["END"], 0.5)
    assert "metadata" not in sent


def test_events_go_from_message_start_to_message_stop(agent: Agent, script: Script) -> None:
    said = {**calling(tool_call("look", {"a": 1}, id="c1")), "content": "Look.", "reasoning_content": "hm"}
    script.responses["begin"] = lambda request: Response(body=answer(request, said))
    streamed = events(ask(agent, "begin", stream=True))
    assert [name for name, _ in streamed] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in streamed)
    deltas = [data["delta"] for name, data in streamed if name == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert streamed[-2][1]["delta"]["stop_reason"] == "tool_use"


def test_thinking_context_management_and_effort_are_ignored(agent: Agent, script: Script) -> None:
    ignored = {"thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "output_config": {"effort": "x"}}
    assert ask(agent, "ignored", **ignored).status == 200
    assert not ignored.keys() & script.received("ignored")[-1].body.keys()


def test_a_schema_becomes_the_response_format(agent: Agent, script: Script) -> None:
    schema = {"type": "object"}
    ask(agent, "schema", output_config={"format": {"type": "json_schema", "schema": schema}})
    sent = script.received("schema")[-1].body["response_format"]
    assert (sent["type"], sent["json_schema"]["schema"]) == ("json_schema", schema)


def test_system_tools_and_results_become_a_chat(agent: Agent, script: Script) -> None:
    messages = [
        {"role": "user", "content": [TEXT | {"cache_control": {}}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [THINKING, {"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"k": "ü"}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [TEXT]},
                {"type": "text", "text": "last"},
            ],
        },
        {"role": "system", "content": "<total_tokens>5 tokens left</total_tokens>"},
    ]  # fmt: skip
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"},
        {"type": "text", "text": "You are an agent."},
    ]
    tools = [{"name": "f", "description": "F.", "input_schema": {"type": "object"}, "cache_control": {}}]
    choice = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    response = ask(agent, messages, system=system, tools=tools, tool_choice=choice)
    assert response.status == 200, response.body
    sent = script.server.received[-1].body
    assert sent["messages"] == [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "a\n\nb"},
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "hm",
            "tool_calls": [tool_call("f", '{"k": "ü"}', id="t1")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a"},
        {"role": "user", "content": "last"},
        {"role": "system", "content": "<total_tokens>5 tokens left</total_tokens>"},
    ]
    function = {"name": "f", "description": "F.", "parameters": {"type": "object"}}
    assert sent["tools"] == [{"type": "function", "function": function}]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert sent["parallel_tool_calls"] is False


IMAGE = {"type": "image", "source": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0] of type 'image'"),
        (
            {"messages": [{"role": "user", "content": [RESULT | {"content": [IMAGE]}]}]},
            "messages[0].content[0].content[0] of type 'image'",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]}, "messages ends"),
        ({"messages": "x"}, "messages must be a list"),
        ({"messages": [5]}, "messages[0] must be an object"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type 'web_search_20250305'"),
        ({"tools": 5}, "tools must be a list"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"system": 5}, "system"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format of type 'grammar'"),
        ({"temperature": "hot"}, "temperature"),
    ],
)  # fmt: skip
def test_what_a_recording_cannot_honour_names_the_field(agent: Agent, fields: dict[str, Any], named: str) -> None:
    response = ask(agent, "hello", **fields)
    assert response.status == 400, response.body
    error = response.json
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert named in error["error"]["message"]
    assert agent.turns() == 0


def test_errors_have_the_form_of_the_api(agent: Agent, script: Script, sessions: SessionsProcess) -> None:
    script.responses["long"] = lambda _: Response(
        status=400, body=b'{"error":{"message":"This model\'s maximum context length is 9 tokens"}}'
    )
    refused = ask(agent, "long").json["error"]
    assert refused["type"] == "invalid_request_error"
    assert refused["message"].startswith("prompt is too long: This model's maximum context length is 9 tokens")
    script.responses["down"] = lambda _: Response(status=429, body=b"slow down")
    assert ask(agent, "down").json["error"] == {"type": "rate_limit_error", "message": "slow down"}
    missing = sessions.request("POST", f"/sessions/{'0' * 32}{PATH}", {})
    assert (missing.status, missing.json["type"], missing.json["error"]["type"]) == (404, "error", "not_found_error")


@pytest.mark.parametrize("name", ["x-api-key", "Authorization"])
def test_the_secret_is_a_key_or_a_bearer_token(script: Script, tmp_path: Path, name: str) -> None:
    with running(tmp_path, script.server.url, "--require-secret") as process:
        agent = process.agent()
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "secret"}]}
        for secret, status in ((agent.secret, 200), ("wrong", 401)):
            value = secret if name == "x-api-key" else f"Bearer {secret}"
            response = process.request("POST", agent.path + PATH, body, {name: value})
            assert response.status == status, response.body
        assert response.json["error"]["type"] == "authentication_error"
        assert agent.secret not in str(script.received("secret")[-1].headers)


def test_tokens_are_counted_by_the_engine_or_guessed(agent: Agent, script: Script, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "count me"}], "system": "s", "tools": [{"name": "f"}]}
    guessed = agent.request("POST", "/v1/messages/count_tokens?beta=true", body)
    assert guessed.status == 200
    assert 10 < guessed.json["input_tokens"] < 100
    with running(
        tmp_path, script.server.url, "--policy-renderer", "bytes-chatml", engine__dialect="generate"
    ) as process:
        counted = process.agent().request("POST", "/v1/messages/count_tokens", body | {"tools": []}).json
        longer = (
            process.agent().request("POST", "/v1/messages/count_tokens", body | {"tools": [], "system": "s12"}).json
        )
    assert longer["input_tokens"] == counted["input_tokens"] + 2
    assert agent.turns() == 0


def test_agents_are_told_apart_by_url_and_header(agent: Agent) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "who"}]}
    assert agent.request("POST", f"/branch/scout{PATH}", body).status == 200
    assert agent.request("POST", PATH, body, x_claude_code_agent_id="a1").status == 200
    samples = agent.request("POST", "/seal").json
    assert len(samples["sample_lengths"]) == 2
    assert samples["metrics"]["breaks"] == 0
