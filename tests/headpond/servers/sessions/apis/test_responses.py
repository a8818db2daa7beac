"""The Responses API, with the `openai` package and on the wire."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from support.session_process import Agent, HttpResponse, Script, SessionsProcess, running
from support.upstream import ReceivedRequest, Response, answer, calling, tool_call

PATH = "/v1/responses"
MODEL = "policy"
TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]


@pytest.fixture
def sdk(agent: Agent) -> Iterator[OpenAI]:
    with OpenAI(base_url=agent.base_url, api_key=agent.secret, max_retries=0) as client:
        yield client


def thoughtful(request: ReceivedRequest) -> Response:
    number = len(request.messages)
    calls = [tool_call("look", f'{{"at":{number}}}', id=f"c{number}_{each}") for each in range(2)]
    said = {**calling(*calls), "content": f"Step {number}.", "reasoning_content": f"hm {number}"}
    return Response(body=answer(request, said, routed=True))


def ask(agent: Agent, text: Any, **fields: Any) -> HttpResponse:
    return agent.request("POST", PATH, {"model": MODEL, "input": text, **fields})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_the_sdk_calls_tools_and_returns_its_items(
    agent: Agent, script: Script, sdk: OpenAI, *, stream: bool, named: bool
) -> None:
    script.responses["begin"] = script.responses["seen"] = thoughtful
    items: Any = [{"role": "developer", "content": "Look around."}, {"role": "user", "content": "begin"}]
    previous: Any = openai.omit
    for _ in range(3):
        options: Any = {"model": MODEL, "input": items, "tools": TOOLS, "instructions": "Be brief."}
        if stream:
            with sdk.responses.stream(**options, previous_response_id=previous) as events:
                response: Any = events.get_final_response()
        else:
            response = sdk.responses.create(**options, previous_response_id=previous, store=False)
        assert (response.status, response.output_text[:4]) == ("completed", "Step")
        calls = [item for item in response.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "seen"} for call in calls]
        items = results if named else [*items, *response.output, *results]
        previous = response.id if named else openai.omit
    first, *_, last = [record["request"]["messages"] for record in agent.request("GET").json["records"]]
    assert first == [
        {"role": "system", "content": "Be brief.\n\nLook around."},
        {"role": "user", "content": "begin"},
    ]
    assert len(last) == 2 + 2 * 3
    sealed = agent.request("POST", "/seal").json
    assert (len(sealed["sample_lengths"]), sealed["metrics"]["turns"], sealed["metrics"]["breaks"]) == (1, 3, 0)


def test_events_end_on_completed(sdk: OpenAI, agent: Agent, script: Script) -> None:
    script.responses["begin"] = thoughtful
    events: Any = list(sdk.responses.create(model=MODEL, input="begin", stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert events[-1].response.usage.output_tokens > 0


def test_a_schema_and_logprobs_are_honoured(sdk: OpenAI, script: Script) -> None:
    schema: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}
    response: Any = sdk.responses.create(
        model=MODEL, input="schema", text=schema, include=["message.output_text.logprobs"], top_logprobs=1
    )
    sent = script.received("schema")[-1].body
    assert sent["response_format"]["json_schema"] == {"name": "x", "schema": {"type": "object"}, "strict": True}
    assert len(response.output[0].content[0].logprobs) == len("answer 1 to schema")


def test_a_cut_response_is_incomplete(agent: Agent, script: Script) -> None:
    def cut(request: ReceivedRequest) -> Response:
        body = json.loads(answer(request, "half"))
        body["choices"][0]["finish_reason"] = "length"
        return Response(body=json.dumps(body).encode())

    script.responses["cut"] = cut
    response = ask(agent, "cut", max_output_tokens=4).json
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert script.received("cut")[-1].body["max_tokens"] == 4
    assert b"event: response.incomplete" in ask(agent, "cut", stream=True).body


def test_tools_of_namespaces_and_custom_tools_are_functions(agent: Agent, script: Script) -> None:
    calls = (tool_call("mcp__x__f", {"a": 1}, id="c1"), tool_call("patch", {"input": "*** Begin"}, id="c2"))
    script.responses["tools"] = lambda request: Response(body=answer(request, calling(*calls)))
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    tools = [
        {"type": "namespace", "name": "mcp__x", "description": "", "tools": [function]},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
        {"type": "web_search", "external_web_access": False},
    ]
    output = ask(agent, [{"role": "user", "content": "tools"}], tools=tools, tool_choice="auto").json["output"]
    sent = script.received("tools")[-1].body["tools"]
    assert [tool["function"]["name"] for tool in sent] == ["mcp__x__f", "patch"]
    assert sent[1]["function"]["description"] == "start: x"
    called, patched = output
    assert (called["type"], called["namespace"], called["name"]) == ("function_call", "mcp__x", "f")
    assert (patched["type"], patched["name"], patched["input"]) == ("custom_tool_call", "patch", "*** Begin")
    results = [
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    assert ask(agent, [{"role": "user", "content": "tools"}, *output, *results], tools=tools).status == 200
    assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"instructions": ["x"]}, "instructions"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] of type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "computer_call"}]}, "input[0] of type 'computer_call'"),
        ({"input": 5}, "input must be a list"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type 'code_interpreter'"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "Previous response with id 'resp_1' not found"),
        ({"previous_response_id": 5}, "Previous response"),
    ],
)  # fmt: skip
def test_what_a_recording_cannot_honour_names_the_field(agent: Agent, fields: dict[str, Any], named: str) -> None:
    response = ask(agent, "hello", **fields)
    assert response.status == 400, response.body
    assert named in response.error
    assert agent.turns() == 0


def test_a_format_that_cannot_be_recorded_is_named(agent: Agent) -> None:
    body = {"model": MODEL, "input": "hello", "text": {"format": {"type": "grammar"}}}
    response = agent.request("POST", PATH, body)
    assert (response.status, "text.format of type 'grammar'" in response.error) == (400, True)


def test_a_response_of_another_session_is_not_found(agent: Agent, sessions: SessionsProcess) -> None:
    own, id = (ask(each, "hello").json["id"] for each in (agent, sessions.agent()))
    assert ask(agent, "and", previous_response_id=own).status == 200
    response = ask(agent, "and", previous_response_id=id)
    assert (response.status, "not found" in response.error) == (400, True)
    assert agent.turns() == 2


def test_instructions_hold_for_one_request(agent: Agent, script: Script) -> None:
    items = [{"role": "developer", "content": "\n\nstays"}, {"role": "user", "content": "one"}]
    first = ask(agent, items, instructions="goes").json["id"]
    second = ask(agent, "two", previous_response_id=first).json["id"]
    ask(agent, "three", previous_response_id=second, instructions="new")
    sent = [script.received(text)[-1].messages[0]["content"] for text in ("one", "two", "three")]
    assert sent == ["goes\n\n\n\nstays", "\n\nstays", "new\n\n\n\nstays"]


def test_previous_responses_are_found_after_a_kill(script: Script, tmp_path: Path) -> None:
    port = {"sessions__instance_id": "3" * 32}
    with running(tmp_path, script.server.url, **port) as server:
        agent = server.agent()
        id = ask(agent, "one", instructions="Be brief.").json["id"]
        server.kill()
    with running(tmp_path, script.server.url, **port) as server:
        agent.server = server
        assert ask(agent, "two", previous_response_id=id, instructions="Be brief.").status == 200
        assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 1


def test_a_retry_gets_the_recorded_answer_in_its_api(agent: Agent, script: Script) -> None:
    body = {"model": MODEL, "input": "once", "stream": True}
    first = agent.request("POST", PATH, body, idempotency_key="k")
    again = agent.request("POST", PATH, body, idempotency_key="k")
    assert (first.body, len(script.received("once")), agent.turns()) == (again.body, 1, 1)


def test_errors_become_the_exceptions_of_the_sdk(sdk: OpenAI, script: Script) -> None:
    text = "This model's maximum context length is 9 tokens"
    script.responses["long"] = lambda _: Response(status=400, body=json.dumps({"error": {"message": text}}).encode())
    with pytest.raises(openai.BadRequestError) as raised:
        sdk.responses.create(model=MODEL, input="long")
    assert (raised.value.code, raised.value.message[-len(text) :]) == ("context_length_exceeded", text)


def test_one_model_is_found_by_its_name(sessions: SessionsProcess, script: Script, monkeypatch: Any) -> None:
    served = {"object": "list", "data": [{"id": "Qwen/Qwen3", "object": "model"}]}
    monkeypatch.setattr(script.server, "respond", lambda _: Response(body=json.dumps(served).encode()))
    agent = sessions.agent()
    with OpenAI(base_url=agent.base_url, api_key=agent.secret, max_retries=0) as client:
        assert client.models.retrieve("Qwen/Qwen3").id == "Qwen/Qwen3"
        with pytest.raises(openai.NotFoundError, match="the engine has no model 'gpt'"):
            client.models.retrieve("gpt")
    forced = sessions.agent(model="Qwen/Qwen3")
    assert forced.request("GET", "/branch/b/v1/models/gpt-4o-mini").json["id"] == "gpt-4o-mini"
