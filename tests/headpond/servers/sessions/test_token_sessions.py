"""Token-in/token-out through a session: the renderer makes prompts, messages and what the client asked for."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.api_clients import CLIENTS, ApiClient
from support.engine_responses import ResponseSpec
from support.session_process import Agent, SessionsProcess, running
from support.stores import directory_store
from support.tokenizer_directory import tokenizer_dir
from support.upstream import Message, ReceivedRequest, Response, Server, serving, tool_call
from tokenizers import Tokenizer

from headpond.renderers import bytes_chatml
from headpond.store import BlobRef
from headpond.store.columns import read_columns

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THINKING = "<think>\nOne and one.\n</think>\n\n"


def respond(request: ReceivedRequest) -> Response:
    """Completions in bytes-chatml: of the prompt's last message, whose text says what to write."""
    sent = request.body.get("token_ids") or request.body["input_ids"]
    asked = bytes_chatml.decode_messages(np.array(sent))[-1]["content"]
    text = {"call": CALL, "stop": "one STOP two"}.get(asked, f"answer to {asked}")
    completion = bytes_chatml.encode_completion({"content": text}).tolist()
    dialect = "generate" if "token_ids" in request.body else "sglang"
    body: Any = ResponseSpec(prompt=sent, completion=completion, dialect=dialect, content="the engine's own").as_dict()
    body["choices"][0]["finish_reason"] = "stop"
    if dialect == "sglang":
        body["choices"][0]["prompt_token_ids"] = sent
        body["usage"] = {"completion_tokens": len(completion)}
        body["choices"][0]["logprobs"] = {"content": [{"token": "x", "logprob": -1.0}] * len(completion)}
    else:
        for entry in body["choices"][0]["logprobs"]["content"]:
            entry["top_logprobs"] = [{"token": "token_id:65", "logprob": -1.5, "bytes": []}]
    return Response(body=json.dumps(body).encode())


@pytest.fixture(scope="module")
def engine() -> Iterator[Server]:
    with serving(respond) as server:
        yield server


@contextmanager
def tokens(directory: Path, url: str, dialect: str, *arguments: str, renderer: str = "bytes-chatml") -> Iterator[Any]:
    settings = {"engine__dialect": dialect, "engine__hidden_layers": "1", "engine__experts_per_token": "1"}
    with running(directory, url, "--policy-renderer", renderer, *arguments, **settings) as process:
        yield process


@pytest.fixture(scope="module", params=[("generate", "linear"), ("generate", "open"), ("sglang", "open")], ids=str)
def sessions(
    request: pytest.FixtureRequest, engine: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SessionsProcess]:
    dialect, mode = request.param
    with tokens(tmp_path_factory.mktemp("tokens"), engine.url, dialect, "--mode", mode) as process:
        yield process


def sent_ids(agent: Agent) -> list[int]:
    request = agent.request("GET").json["records"][-1]["request"]
    return request.get("token_ids") or request["input_ids"]


def test_history_is_sent_as_it_was_recorded(agent: Agent) -> None:
    """`call` becomes a tool call; its echo with other white space is not tokenized again."""
    agent.talk("one")
    agent.talk("call")
    before = agent.request("GET").json["metadata"]["accumulated_token_ids"]
    echo: Message = {"role": "assistant", "content": "", "tool_calls": [tool_call("add", '{"a":1}', id="x")]}
    agent.messages[-1] = echo
    result = {"role": "tool", "tool_call_id": "x", "content": "2"}
    assert agent.chat([*agent.messages, result]).content == "answer to 2"
    assert sent_ids(agent)[: len(before)] == before
    sealed = agent.request("POST", "/seal").json
    assert len(sealed["sample_lengths"]) == 1


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_api_continues_recorded_tokens(agent: Agent, client: ApiClient) -> None:
    items = client.items([{"role": "user", "content": "call"}])
    response = agent.request("POST", client.path, client.request(items, system="Be brief."))
    echo = client.answer(response.json)
    (id,) = client.calls(echo)
    items += [*echo, *client.items([{"role": "tool", "tool_call_id": id, "content": "2"}])]
    before = agent.request("GET").json["metadata"]["accumulated_token_ids"]
    assert agent.request("POST", client.path, client.request(items, system="Be brief.")).status == 200
    assert sent_ids(agent)[: len(before)] == before
    assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 1


def test_answers_become_messages_here(agent: Agent) -> None:
    choice = agent.chat("call").json["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_a_client_gets_streams_usage_and_logprobs_as_it_asks(agent: Agent) -> None:
    plain = agent.chat("one").json
    completion = len(bytes_chatml.encode_completion({"content": "answer to one"}))
    assert plain["usage"]["completion_tokens"] == completion
    assert plain["choices"][0]["logprobs"] is None
    assert not {"token_ids", "meta_info", "routed_experts"} & plain["choices"][0].keys()
    streamed = agent.chat("one", stream=True, stream_options={"include_usage": True})
    *events, done, _ = streamed.body.decode().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert (done, chunks[-1]["choices"]) == ("data: [DONE]", [])
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks[:-1]) == "answer to one"
    logprobs = agent.chat("one", logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"]["content"]
    assert len(logprobs) == completion


def test_a_string_that_ends_the_completion_is_not_in_the_message(agent: Agent) -> None:
    for stop in ("STOP", ["never", "STOP"]):
        assert agent.chat("stop", stop=stop).content == "one "
    assert agent.chat("stop").content == "one STOP two"


def test_tokens_of_logprobs_are_named_by_their_text(engine: Server, tmp_path: Path) -> None:
    with tokens(tmp_path, engine.url, "generate") as process:
        agent: Agent = process.agent()
        content = agent.chat("one", logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == "answer to one"
        assert content[0]["top_logprobs"] == [{"token": "A", "logprob": -1.5, "bytes": [65]}]
        content = agent.chat("one", logprobs=True).json["choices"][0]["logprobs"]["content"]
        assert content[0]["top_logprobs"] == []
        sent = agent.request("GET").json["records"][0]["request"]
        assert sent["sampling_params"] == {"logprobs": 1}


def test_fields_of_chats_do_not_become_sampling_parameters(engine: Server, tmp_path: Path) -> None:
    schema = {"type": "object"}
    fields = {"tool_choice": "auto", "user": "me", "top_p": None, "metadata": {}, "max_completion_tokens": 7}
    fields |= {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    with tokens(tmp_path, engine.url, "generate") as process:
        agent: Agent = process.agent()
        assert agent.chat("one", top_logprobs=30, temperature=0.5, **fields).status == 200
        sent = agent.request("GET").json["records"][-1]["request"]["sampling_params"]
    assert sent == {"temperature": 0.5, "max_tokens": 7, "logprobs": 20, "structured_outputs": {"json": schema}}


@contextmanager
def with_template(tmp_path: Path, **template: str) -> Iterator[tuple[SessionsProcess, Tokenizer]]:
    """A session server with a tokenizer's directory, whose engine thinks before it answers."""
    directory = tokenizer_dir(tmp_path / "tokenizer", **template)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()

    def thinking(request: ReceivedRequest) -> Response:
        completion = tokenizer.encode(f"{THINKING}Two.<|im_end|>", add_special_tokens=False).ids
        body = ResponseSpec(prompt=request.body["token_ids"], completion=completion, dialect="generate").as_dict()
        return Response(body=json.dumps(body).encode())

    with serving(thinking) as server, tokens(tmp_path, server.url, "generate", renderer=str(directory)) as process:
        yield process, tokenizer


def test_template_values_of_a_client_reach_the_renderer(tmp_path: Path) -> None:
    with with_template(tmp_path) as (process, tokenizer):
        for values, ending in (({}, "assistant\n"), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")):
            agent = process.agent()
            for text in ("one", "two"):
                response = agent.talk(text, chat_template_kwargs=values)
                prompt = tokenizer.decode(sent_ids(agent), skip_special_tokens=False)
                assert prompt.endswith(ending), prompt
            assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 1
        assert response.json["choices"][0]["message"]["reasoning_content"] == "One and one."
        refused = process.agent().chat("one", chat_template_kwargs=["enable_thinking"])
        assert (refused.status, refused.error) == (400, "chat_template_kwargs must be an object")


def test_thoughts_that_a_template_drops_stay_in_the_recorded_history(tmp_path: Path) -> None:
    """The template shows thoughts behind the last question only: the bridge appends to what was sampled."""
    with with_template(tmp_path) as (process, tokenizer):
        agent = process.agent()
        for number in range(3):
            agent.talk(f"question {number}")
            agent.messages[-1].pop("reasoning_content")
        sealed = agent.request("POST", "/seal").json
        columns = read_columns(directory_store(process.store), BlobRef(**sealed["columns"]))
        assert len(sealed["sample_lengths"]) == 1
        assert tokenizer.decode(columns.input_ids.tolist(), skip_special_tokens=False).count(THINKING) == 3
        assert process.status()["chats"]["rewritten_histories"] == 0


def test_a_template_that_rewrites_history_is_counted_and_starts_a_sample(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ loop.revindex }}{{ message.content }}\n{% endfor %}"
    with with_template(tmp_path, template=template) as (process, _):
        agent = process.agent()
        agent.talk("one")
        agent.talk("two")
        assert process.status()["chats"]["rewritten_histories"] == 1
        assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 2


def test_completions_take_and_return_tokens(agent: Agent) -> None:
    """An agent that renders its prompts itself: a prompt that begins with what was recorded extends the sample."""
    ids = bytes_chatml.encode([{"role": "user", "content": "one"}]).tolist()
    for number in range(2):
        options = {"prompt": ids, "max_tokens": 9, "logprobs": 1} | ({"stream": True} if number else {})
        response = agent.request("POST", "/v1/completions", options)
        assert response.status == 200, response.body
        events = response.body.decode().split("\n\n")
        choice = json.loads(events[0].removeprefix("data: "))["choices"][0]
        assert choice["text"].startswith("answer to ")
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        history = np.array(ids + choice["token_ids"], np.int32)
        ids = bytes_chatml.encode_next(history, [{"role": "user", "content": "two"}]).tolist()
    sealed = agent.request("POST", "/seal").json
    assert (len(sealed["sample_lengths"]), sealed["metrics"]["turns"]) == (1, 2)


@pytest.mark.parametrize(
    "fields", [{"prompt": "text"}, {"prompt": []}, {"prompt": [[1], [2]]}, {"prompt": [-1]}, {"echo": True}]
)
def test_completions_of_text_are_refused(agent: Agent, fields: dict[str, Any]) -> None:
    response = agent.request("POST", "/v1/completions", {"prompt": [1], **fields})
    assert response.status == 400
    assert next(iter(fields)) in response.error


def test_completions_need_an_engine_that_takes_tokens(engine: Server, tmp_path: Path) -> None:
    with running(tmp_path, engine.url) as process:
        response = process.agent().request("POST", "/v1/completions", {"prompt": [1]})
        assert (response.status, "policy.renderer" in response.error) == (400, True)
