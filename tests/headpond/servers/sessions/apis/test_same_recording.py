"""One conversation through each API: the same tokens, masks, logprobs and rows, byte for byte."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agent_scenarios import Message, Sent, assert_sealed, plain_turns, recorded, scenarios
from support.api_clients import CLIENTS, ApiClient, ResponsesClient
from support.conversations import LAYERS, TOPK
from support.plain_samples import merge
from support.session_process import Agent, SessionsProcess, running
from support.stores import directory_store
from support.upstream import ReceivedRequest, Response, Server, answer, serving, tool_call, user

from headpond.servers.sessions.apis import api_of
from headpond.store import BlobRef
from headpond.store.columns import read_columns
from headpond.store.experts import Experts

TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCRIPT = "script: "
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=6)
MALFORMED = ["", "{", "[1]", '{"a": NaN}', "7", "[" * 120 + "]" * 120]


@dataclass(frozen=True)
class Plan:
    """A conversation: what the system and the user say, and what the model answers."""

    system: str
    answers: list[Message]
    followed: list[str]
    """What the user says after each answer, besides the results of its calls."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    answers: list[Message] = []
    for number in range(draw(st.integers(1, 4))):
        said: Message = {"role": "assistant", "content": draw(st.none() | TEXTS.map(lambda text: f"a{text}"))}
        if draw(st.booleans()):
            said[draw(st.sampled_from(["reasoning", "reasoning_content"]))] = draw(TEXTS.map(lambda text: f"hm{text}"))
        if draw(st.booleans()):
            arguments = st.sampled_from(MALFORMED) | st.integers(0, 9).map(lambda x: f'{{"x":  {x}.0, "y": [[{x}]]}}')
            names = draw(st.lists(st.sampled_from(["look", "go"]), min_size=1, max_size=3))
            said["tool_calls"] = [
                tool_call(name, draw(arguments), id=f"c{number}_{at}") for at, name in enumerate(names)
            ]
        if said["content"] is None and not said.get("tool_calls"):
            said["content"] = "."
        answers.append(said)
    followed = draw(st.lists(TEXTS, min_size=len(answers), max_size=len(answers)))
    return Plan(system=draw(st.sampled_from(["", "Be brief."])), answers=answers, followed=followed)


def respond(request: ReceivedRequest) -> Response:
    """The first user message has the answers of the whole conversation."""
    first = next(message["content"] for message in request.messages if message["role"] == "user")
    answers = json.loads(first.removeprefix(SCRIPT))
    said = sum(message["role"] == "assistant" for message in request.messages)
    return Response(body=answer(request, answers[said], routed=True))


@pytest.fixture(scope="module")
def engine() -> Iterator[Server]:
    with serving(respond) as server:
        yield server


@pytest.fixture(scope="module", params=["open", "linear"])
def sessions(
    request: pytest.FixtureRequest, engine: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SessionsProcess]:
    with running(tmp_path_factory.mktemp("same"), engine.url, "--mode", request.param) as process:
        yield process


def play(agent: Agent, client: ApiClient, plan: Plan, *, stream: bool = False, named: bool = False) -> None:
    """`named`: each request names the response before it instead of repeating the conversation."""
    items = client.items([user(SCRIPT + json.dumps(plan.answers))])
    previous: dict[str, str] = {}
    for text in plan.followed:
        request = client.request(items, system=plan.system, tools=TOOLS) | previous
        response = agent.request("POST", client.path, request | ({"stream": True} if stream else {}))
        assert response.status == 200, response.body
        given = client.streamed(response.body) if stream else response.json
        echo = client.answer(given)
        results = [{"role": "tool", "tool_call_id": id, "content": f"result of {id}"} for id in client.calls(echo)]
        new = client.items([*results, user(f"then {text}")])
        items = new if named else [*items, *echo, *new]
        previous = {"previous_response_id": given["id"]} if named else {}


def sealed(agent: Agent, store: Path) -> list[bytes]:
    """Everything that is trained on, as bytes."""
    refs = agent.request("POST", "/seal").json
    assert (len(refs["sample_lengths"]), refs["metrics"]["breaks"]) == (1, 0)
    files = directory_store(store)
    columns = read_columns(files, BlobRef(**refs["columns"]))
    rows = np.empty((len(columns.input_ids), LAYERS, TOPK), np.int16)
    Experts(files, BlobRef(**refs["experts"])).read(0, 0, len(rows), rows)
    arrays = (columns.input_ids, columns.loss_mask, columns.logprobs, columns.sample_offsets, rows)
    return [array.tobytes() for array in arrays]


@settings(max_examples=15)
@given(plan=plans())
def test_every_api_records_the_same(sessions: SessionsProcess, plan: Plan) -> None:
    expected: list[bytes] = []
    for client in CLIENTS:
        for options in ({}, {"stream": True}, *([{"named": True}] if isinstance(client, ResponsesClient) else [])):
            agent = sessions.agent()
            play(agent, client, plan, **options)
            recording = sealed(agent, sessions.store)
            expected = expected or recording
            assert recording == expected, (client.name, options)


@pytest.mark.parametrize("client", CLIENTS[1:], ids=lambda client: client.name)
@settings(max_examples=25)
@given(requests=scenarios(), choices=st.lists(st.integers(0, 5), max_size=24), killed_after=st.integers(-1, 20))
def test_echoes_retries_and_branches_through_an_api(
    client: ApiClient, requests: list[Sent], choices: list[int], killed_after: int
) -> None:
    """The scenarios of `test_any_order.py`, with an agent that returns its messages in the API's form."""
    api = api_of(f"/sessions/x{client.path}")

    def through(messages: list[Message]) -> list[Message]:
        given = json.loads(json.dumps(client.request(client.items(messages))))
        return api.chat(given, None).fields["messages"]

    expected, _ = merge(plain_turns(requests))
    with tempfile.TemporaryDirectory() as root:
        store = directory_store(Path(root))
        assert_sealed(store, asyncio.run(recorded(store, requests, choices, killed_after, through)), expected)
