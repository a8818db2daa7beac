"""The dialect of docs/engines.md, in a package outside the project: its server is played through a rollout worker's
policy and through a session server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conversations import rows_of
from support.documents import ROOT, Page
from support.engine_clients import attempt_of, loaded, run, stage_of
from support.engine_responses import compact, request_info, routed
from support.session_process import running
from support.stores import directory_store
from support.upstream import ReceivedRequest, Response, Server, prompt_ids, serving, user
from typer.testing import CliRunner

from headpond.commands.main import app
from headpond.engines.responses.response import read_turn
from headpond.environments.protocol import Policy
from headpond.errors import ConfigError
from headpond.playing.rollout import play
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef
from headpond.store.columns import read_columns
from headpond.turn import Fingerprint, OpenSample, RouteFormat

ACME = "acme_dialect:Acme"
TOO_LONG = "tell me everything"
ROUTES = RouteFormat(layers=3, topk=2, wire="uint8")


def answer(text: str, prompt: list[int], *, state: str = "done") -> dict[str, Any]:
    completion = list(text.encode())
    steps = [{"token": token, "logprob": -token / 64} for token in completion]
    experts = routed(rows_of([*prompt, *completion]), "object")
    return {"state": state, "text": text, "weights": 7, "steps": steps, "experts": experts, "prompt": prompt}


def respond(request: ReceivedRequest) -> Response:
    """Each dialogue is cancelled once before it is answered."""
    assert (request.method, request.path) == ("POST", "/complete")
    assert request.body["model"] == "policy"
    assert request.body["options"]["trace"] is True
    dialogue = request.body["dialogue"]
    if dialogue[-1]["content"] == TOO_LONG:
        return Response(status=400, body=b'{"problem": "Prompt too  long: 9 of 8 tokens"}')
    if "X-Retry-Count" in request.headers and request.retry == 0:
        return Response(body=compact(answer("lost", prompt_ids(dialogue), state="cancelled")))
    return Response(body=compact(answer(f"answer {len(dialogue)}", prompt_ids(dialogue))))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    package = tmp_path / "package"
    package.mkdir()
    (package / "acme_dialect.py").write_text(Page(ROOT / "docs" / "engines.md").blocks("python")[0])
    monkeypatch.syspath_prepend(package)
    monkeypatch.setenv("PYTHONPATH", str(package))
    with serving(respond) as server:
        yield server


class Dialogue:
    """Two turns, then a question that exceeds the server's context."""

    def __init__(self, questions: list[str]) -> None:
        self.examples = [questions]

    async def rollout(self, example: list[str], policy: Policy) -> float:
        messages: list[dict[str, Any]] = []
        for question in example:
            messages.append(user(question))
            completion = await policy.chat(messages)
            assert completion.finish_reason == "stop"
            messages.append(dict(completion.message))
        return 1.0


def played(root: Path, server: Server, *questions: str) -> RolloutResult:
    results: list[RolloutResult] = []

    async def main() -> None:
        async with stage_of(root, server.url, dialect=ACME, routed_experts=True) as stage:
            results.append(await play(stage, loaded(Dialogue(list(questions))), 0, attempt_of()))

    run(main)
    return results[0]


def check_recorded(root: Path, columns: BlobRef, expected: list[int]) -> None:
    recorded = read_columns(directory_store(root), columns)
    assert recorded.input_ids.tolist() == expected
    sampled = recorded.loss_mask == 1
    assert bytes(recorded.input_ids[sampled].astype(np.uint8).tolist()) == b"answer 1answer 3"
    assert np.array_equal(recorded.logprobs[sampled], -recorded.input_ids[sampled].astype(np.float32) / 64)


def sequence_of(texts: list[str]) -> list[int]:
    """All tokens of a dialogue."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [*prompt_ids(messages[:-1]), *texts[-1].encode()]


def test_a_dialect_from_outside_is_played_by_a_rollout_worker(tmp_path: Path, server: Server) -> None:
    result = played(tmp_path / "store", server, "one", "two")
    assert (result.policy_error, result.metrics["turns"]) == (None, 2)
    assert result.columns is not None
    assert result.experts is not None
    check_recorded(tmp_path / "store", result.columns, sequence_of(["one", "answer 1", "two", "answer 3"]))
    assert [request.retry for request in server.received] == [0, 1, 0, 1], "a cancelled completion is asked for again"


def test_its_context_limit_is_a_failure_of_the_policy(tmp_path: Path, server: Server) -> None:
    result = played(tmp_path / "store", server, "one", TOO_LONG)
    assert result.policy_error is not None
    assert re.search("context limit: .* answered 400: .*Prompt too long", result.policy_error)


def test_a_dialect_from_outside_is_played_through_a_session_server(tmp_path: Path, server: Server) -> None:
    with running(tmp_path, server.url, "--engine-routed-experts", engine__dialect=ACME) as sessions:
        agent = sessions.agent()
        first = agent.talk("one").json
        message = {"role": "assistant", "content": "answer 1"}
        assert first["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
        assert first["usage"]["completion_tokens"] == len("answer 1")
        streamed = agent.chat([*agent.messages, user("two")], stream=True, temperature=0.5).body
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in streamed.split(b"\n\n")[:-2]]
        assert any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)
        shown = agent.request("GET").json
        assert [record["path"] for record in shown["records"]] == ["/complete"] * 2
        assert shown["records"][1]["request"]["options"] == {"temperature": 0.5, "trace": True}
        sealed = agent.request("POST", "/seal").json
        assert agent.server.agent().chat(TOO_LONG).status == 400
    check_recorded(sessions.store, BlobRef(**sealed["columns"]), sequence_of(["one", "answer 1", "two", "answer 3"]))
    assert sealed["experts"] is not None


def test_its_keys_skip_what_is_recorded_already(server: Server) -> None:
    """Ids and rows of an open sample are not read: noise in their place changes nothing."""
    prompt = prompt_ids([user("one")])
    body, held = compact(answer("answer", prompt)), prompt[:2]
    sample = OpenSample(sequence=Fingerprint.of(np.array(held, np.int32)), rows_from=len(held))
    request = request_info(ACME)
    turn = read_turn(body, request=request, open_samples=[sample], route_format=ROUTES)
    data = body.index(b'"data":"') + len(b'"data":"')
    noisy = body[:data] + b'"' * 8 + body[data + 8 :]
    again = read_turn(noisy, request=request, open_samples=[sample], route_format=ROUTES)
    for read in (turn, again):
        assert read.routes is not None
        assert (read.extends, read.prompt_ids.tolist(), read.version) == (0, prompt[2:], 7)
        assert np.array_equal(read.routes.rows, rows_of([*prompt, *b"answer"])[2:])


def test_a_session_server_without_the_package_is_refused(tmp_path: Path) -> None:
    arguments = ["--port", "0", "--store", f"file://{tmp_path}"]
    result = CliRunner().invoke(app, ["sessions", *arguments], env={"HEADPOND_ENGINE__DIALECT": "acme_dialekt:Acme"})
    assert isinstance(result.exception, ConfigError)
    assert "cannot be imported: No module named 'acme_dialekt'" in str(result.exception)
