"""The `openai` package, unchanged, against the real server."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from support.session_process import Agent, Script, SessionsProcess, running
from support.upstream import ReceivedRequest, Response, answer, calling, tool_call
from support.waiting import wait_until

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
MODEL = "policy"


@pytest.fixture(scope="module")
def sessions(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    with running(tmp_path_factory.mktemp("sessions"), script.server.url, "--require-secret") as process:
        yield process


def client(agent: Agent, **options: Any) -> OpenAI:
    return OpenAI(base_url=agent.base_url, api_key=agent.secret, **{"max_retries": 0, **options})


def ask(agent: Agent, text: Any, **options: Any) -> str | None:
    with client(agent, **options) as sdk:
        completion = sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}])
        return completion.choices[0].message.content


def test_the_sdk_holds_a_conversation(agent: Agent) -> None:
    messages: Any = []
    with client(agent) as sdk:
        for text in ("one", "two"):
            messages.append({"role": "user", "content": text})
            completion = sdk.chat.completions.create(model=MODEL, messages=messages, temperature=0.5)
            assert completion.usage
            assert completion.choices[0].finish_reason == "stop"
            messages.append(completion.choices[0].message)
        assert [message.content for message in messages[1::2]] == ["answer 1 to one", "answer 3 to two"]
    assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 1


def test_many_asynchronous_clients_at_once(sessions: SessionsProcess) -> None:
    agents = [sessions.agent() for _ in range(16)]

    async def one(agent: Agent) -> str | None:
        async with AsyncOpenAI(base_url=agent.base_url, api_key=agent.secret, max_retries=0) as sdk:
            completion = await sdk.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": agent.id}]
            )
            return completion.choices[0].message.content

    async def main() -> list[str | None]:
        return await asyncio.gather(*map(one, agents))

    assert asyncio.run(main()) == [f"answer 1 to {agent.id}" for agent in agents]


def test_the_sdk_streams(agent: Agent) -> None:
    options: Any = {"stream_options": {"include_usage": True}}
    with client(agent) as sdk:
        messages: Any = [{"role": "user", "content": "streamed"}]
        chunks = list(sdk.chat.completions.create(model=MODEL, messages=messages, stream=True, **options))
        *streamed, usage = chunks
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "answer 1 to streamed"
        assert (streamed[-1].choices[0].finish_reason, usage.choices, usage.usage is not None) == ("stop", [], True)
        with sdk.chat.completions.stream(model=MODEL, messages=messages) as stream:
            assert stream.get_final_completion().choices[0].message.content == "answer 1 to streamed"
    assert agent.turns() == 2


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_calls_tools(agent: Agent, script: Script, stream: bool) -> None:
    script.responses["add"] = lambda request: Response(
        body=answer(request, calling(tool_call("add", {"a": 1}, id="c1"), tool_call("add", {"a": 2}, id="c2")))
    )
    messages: Any = [{"role": "user", "content": "add"}]
    with client(agent) as sdk:
        if stream:
            with sdk.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as streamed:
                message = streamed.get_final_completion().choices[0].message
        else:
            message = sdk.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        calls: Any = message.tool_calls
        assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
            ("c1", "add", '{"a": 1}'),
            ("c2", "add", '{"a": 2}'),
        ]
        echo: Any = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"}) for call in calls]}
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
        completion = sdk.chat.completions.create(model=MODEL, messages=[*messages, echo, *results], tools=TOOLS)
        assert completion.choices[0].message.content == "answer 4 to 3"
    assert agent.turns() == 2


def test_the_sdk_lists_models(agent: Agent) -> None:
    with client(agent) as sdk:
        assert sdk.get("/models", cast_to=object) == {"path": "/v1/models", "method": "GET"}
        with pytest.raises(openai.NotFoundError):
            sdk.embeddings.create(model=MODEL, input="x")


def test_the_sdk_retries_transient_failures(agent: Agent, script: Script) -> None:
    def twice(request: ReceivedRequest) -> Response:
        if int(request.headers["x-stainless-retry-count"]) == 0:
            return Response(status=503, body=b"{}", headers={"Retry-After-Ms": "1"})
        if int(request.headers["x-stainless-retry-count"]) == 1:
            return Response(breaks_off_at=-1)
        return Response(body=script.body(request))

    script.responses["twice"] = twice
    assert ask(agent, "twice", max_retries=2) == "answer 1 to twice"
    attempts = {request.headers["x-stainless-retry-count"] for request in script.received("twice")}
    assert (attempts, agent.turns()) == ({"0", "1", "2"}, 1), "an error may be asked for twice, to be sure whose it is"


def test_errors_become_the_exceptions_of_the_sdk(agent: Agent, sessions: SessionsProcess, script: Script) -> None:
    for status, kind in [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ]:
        script.responses["refuse"] = lambda _, status=status: Response(
            status=status, body=b'{"error":{"message":"no"}}'
        )
        with pytest.raises(kind, match="no"):
            ask(agent, "refuse")
    script.responses["lie"] = lambda _: Response(body=b"{}")
    assert "the engine's response is malformed" in refused(openai.InternalServerError, agent, "lie")
    assert "messages[0] has content that is not text" in refused(openai.BadRequestError, agent, [{"type": "image_url"}])
    agent.secret = "wrong"
    assert "secret is required" in refused(openai.AuthenticationError, agent, "hello")
    gone = sessions.agent()
    gone.request("DELETE")
    assert "session not found" in refused(openai.NotFoundError, gone, "hello")


def refused(kind: type[openai.APIStatusError], agent: Agent, content: Any) -> str:
    """The message of the SDK's error."""
    with pytest.raises(kind) as raised:
        ask(agent, content)
    return raised.value.message


def test_a_limit_is_sent_once_and_named_as_the_context_length(script: Script, tmp_path: Path) -> None:
    """Agents' libraries look for these words before they decide to send again."""
    with running(tmp_path, script.server.url, policy__max_turns="1") as process:
        agent = process.agent()
        ask(agent, "hello")
        before = process.status()["refused"].get("400", 0)
        with pytest.raises(openai.BadRequestError) as raised:
            ask(agent, "again", max_retries=5)
        assert "This model's maximum context length is" in raised.value.message
        assert (raised.value.code, raised.value.type) == ("context_length_exceeded", "invalid_request_error")
        assert raised.value.response.headers["x-should-retry"] == "false"
        assert process.status()["refused"]["400"] == before + 1


def test_a_busy_session_is_a_conflict(agent: Agent, script: Script) -> None:
    answered = threading.Event()
    script.responses["slow"] = lambda request: Response(body=script.body(request), waits_for=answered)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, agent, "slow")
        wait_until(lambda: script.received("slow"))
        try:
            assert "in-flight chat completion" in refused(openai.ConflictError, agent, "second")
        finally:
            answered.set()
        assert first.result() == "answer 1 to slow"


def test_a_client_that_times_out_can_send_again(agent: Agent, script: Script) -> None:
    answered = threading.Event()
    script.responses["patience"] = lambda request: Response(body=script.body(request), waits_for=answered)
    sent_then_gives_up = openai.Timeout(30, read=0.2)  # the time for reading begins when the request has been sent
    with pytest.raises(openai.APITimeoutError):
        ask(agent, "patience", timeout=sent_then_gives_up)
    answered.set()
    wait_until(lambda: agent.turns() == 1)
    assert ask(agent, "patience") == "answer 1 to patience"
