"""With a tokenizer of its own, the server sends tokens: history is sent as recorded, never tokenized again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import engine_process
from support.engine_responses import compact
from support.real_responses import vllm_generate
from support.session_process import JSON, Script, SessionsProcess, running
from support.stores import directory_store
from support.tokenizer_directory import tokenizer_dir
from support.upstream import ReceivedRequest, Response, serving, user
from typer.testing import CliRunner

from headpond.commands.main import app
from headpond.demo.scripted_engine.expert_table import ExpertTable
from headpond.demo.scripted_engine.options import ExpertShape
from headpond.errors import ConfigError
from headpond.renderers import bytes_chatml
from headpond.store import BlobRef
from headpond.store.columns import read_columns
from headpond.store.experts import Experts

SHAPE = ExpertShape(layers=3, topk=2, experts=16)
SETTINGS = {"engine__dialect": "sglang", "engine__hidden_layers": "3", "engine__moe_experts": "16"}
SETTINGS |= {"engine__experts_per_token": "2"}


def test_an_engine_of_tokens_only_serves_sessions(tmp_path: Path) -> None:
    """The renderer makes the prompt and decodes the completion; the client sees a chat completion."""
    with engine_process.running(tmp_path, "--length", "constant:40") as engine:
        url, arguments = "http://{}:{}".format(*engine.address), ["--policy-renderer", "bytes-chatml"]
        with running(tmp_path, url, *arguments, engine__dialect="generate") as process:
            agent = process.agent()
            for text in ("What is 3 + 4?", "And what is 10 - 2?"):
                before = agent.request("GET").json["metadata"]["accumulated_token_ids"]
                completion = agent.talk(text).json
                shown = agent.request("GET").json
                assert shown["records"][-1]["path"] == "/inference/v1/generate"
                assert shown["records"][-1]["request"]["token_ids"][: len(before)] == before
                assert shown["records"][-1]["response"] == completion
            assert bytes_chatml.decode_messages(np.array(shown["metadata"]["accumulated_token_ids"])) == agent.messages
            assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 1


@pytest.mark.parametrize("wrong", [{}, {"token_id": -1}, {"token": "a"}, {"token": "token_id:4294967296"}], ids=str)
def test_a_likely_token_without_an_id_is_502_and_records_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    candidates: list[dict[str, Any]] = [{"logprob": -1.0, **wrong}]

    def respond(request: ReceivedRequest) -> Response:
        body = vllm_generate(prompt=request.body["token_ids"], completion=[52], logprobs=[-0.5])
        body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = candidates
        return Response(body=compact(body), headers=JSON)

    with serving(respond) as engine:
        arguments = ["--policy-renderer", "bytes-chatml"]
        with running(tmp_path, engine.url, *arguments, engine__dialect="generate") as process:
            agent = process.agent()
            response = agent.chat("What is 2 + 2?", logprobs=True, top_logprobs=1)
            assert (response.status, agent.turns()) == (502, 0)
            assert "the engine's response has" in response.error
            candidates[:] = [{"logprob": -1.0, "token_id": 53}]
            (token,) = agent.chat("What is 2 + 2?", logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"][
                "content"
            ]
            assert [each["token"] for each in token["top_logprobs"]] == ["5"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    directory = tmp_path_factory.mktemp("tokens")
    shape = ["--layers", "3", "--topk", "2", "--experts", "16", "--length", "constant:40"]
    with engine_process.running(directory, "--dialect", "sglang", *shape) as engine:
        url, arguments = (
            "http://{}:{}".format(*engine.address),
            ["--policy-renderer", "bytes-chatml", "--engine-routed-experts"],
        )
        with running(directory, url, *arguments, **SETTINGS) as process:
            yield process


def test_recorded_tokens_are_sent_as_history(tokens: SessionsProcess) -> None:
    agent = tokens.agent()
    for number, text in enumerate(["What is 3 + 4?", "And what is 10 - 2?", "Thanks."]):
        before = agent.request("GET").json["metadata"]["accumulated_token_ids"]
        agent.talk(text)
        shown = agent.request("GET").json
        request = shown["records"][-1]["request"]
        assert request["input_ids"][: len(before)] == before
        assert request["routed_experts_start_len"] == max(0, len(before) - 1)
        assert shown["metadata"]["accumulated_token_ids"][: len(request["input_ids"])] == request["input_ids"]
        assert (shown["metadata"]["mode"], shown["metadata"]["turns"]) == ("linear", number + 1)
    sealed = agent.request("POST", "/seal").json
    columns = read_columns(directory_store(tokens.store), BlobRef(**sealed["columns"]))
    assert sealed["sample_lengths"] == [columns.input_ids.size]
    out = np.empty((columns.input_ids.size, SHAPE.layers, SHAPE.topk), np.int16)
    Experts(directory_store(tokens.store), BlobRef(**sealed["experts"])).read(0, 0, len(out), out)
    np.testing.assert_array_equal(out[:-1], ExpertTable(SHAPE).rows(columns.input_ids))


def test_going_back_reuses_the_shared_tokens(tokens: SessionsProcess) -> None:
    agent = tokens.agent()
    agent.talk("one")
    shared = agent.request("GET").json["metadata"]["accumulated_token_ids"]
    agent.talk("two")
    assert agent.chat([*agent.messages[:2], user("two, again")]).status == 200
    request = agent.request("GET").json["records"][-1]["request"]
    assert request["input_ids"][: len(shared)] == shared
    assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 2


def test_messages_that_cannot_be_tokenized_are_refused(tokens: SessionsProcess) -> None:
    agent = tokens.agent()
    response = agent.chat([{"role": "robot", "content": "x"}])
    assert (response.status, "role 'robot'" in response.error) == (400, True)
    agent.assert_usable()


@pytest.mark.parametrize(
    ("renderer", "dialect", "why"),
    [("bytes-chatml", "vllm", 'engine.dialect = "sglang"'), ("/models/x", "sglang", "/models/x")],
)
def test_a_renderer_that_cannot_be_used_is_refused(tmp_path: Path, renderer: str, dialect: str, why: str) -> None:
    arguments = ["--port", "0", "--store", f"file://{tmp_path}", "--policy-renderer", renderer]
    result = CliRunner().invoke(app, ["sessions", *arguments], env={"HEADPOND_ENGINE__DIALECT": dialect})
    assert isinstance(result.exception, ConfigError)
    assert why in str(result.exception)


def test_a_tokenizer_directory_renders_appended_messages_only(script: Script, tmp_path: Path) -> None:
    directory = tokenizer_dir(tmp_path / "tokenizer")
    settings = {"engine__dialect": "sglang", "engine__hidden_layers": "3", "engine__experts_per_token": "2"}
    script.dialect = "sglang"
    with running(tmp_path, script.server.url, "--policy-renderer", str(directory), **settings) as server:
        agent = server.agent()
        for text in ("hello", "and now?"):
            before = agent.request("GET").json["metadata"]["accumulated_token_ids"]
            agent.talk(text)
            sent = agent.request("GET").json["records"][-1]["request"]["input_ids"]
            assert sent[: len(before)] == before
            assert len(sent) > len(before)
        assert len(agent.request("POST", "/seal").json["sample_lengths"]) == 1
