"""Examinations of servers that differ from a good one in one thing each."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine_clients import quick_engine, run
from support.upstream import ReceivedRequest, Response, answer, calling, serving, tool_call

from headpond.config import RunConfig
from headpond.config.engine import Policy
from headpond.doctor.examination import Examination, quick
from headpond.doctor.findings import Finding, Level
from headpond.engines.dialects import dialect_of
from headpond.engines.http.client import EngineClient
from headpond.errors import EngineUnreachable, InfrastructureFailure, StageError
from headpond.playing.rollout import PlayResources
from headpond.store import open_store

NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
TOO_LONG = "This model's maximum context length is 64 tokens. However, you requested 1 output tokens."
LORA = {"lora": True, "weight_update": "headpond"}
Respond = Callable[[ReceivedRequest], Response]


def engine(
    *,
    mode: str = "processed",
    owned_by: str = "vllm",
    model: str = "policy",
    routed: bool = False,
    refuses_tools: str = "",
    forgets: bool = False,
    version: str = "0.32.0",
    dev_mode: bool = True,
    root: str = "org/model",
    flat: bool = False,
) -> Respond:
    """A server whose completion is a letter. `refuses_tools`: what it answers to chats with tools. `forgets`: its
    template drops the first message of longer chats. `dev_mode`: it has the endpoints that load weights. `flat`: no two
    completions are the same."""
    letters = itertools.count(ord("a"))

    def respond(request: ReceivedRequest) -> Response:
        if request.method == "OPTIONS":
            return page({"detail": "Method Not Allowed"}, status=405 if dev_mode else 404)
        match request.path:
            case "/v1/models":
                served = {"id": model, "owned_by": owned_by, "max_model_len": 4096, "root": root}
                return page({"object": "list", "data": [served]})
            case "/version":
                return page({"version": version})
            case "/v1/chat/completions":
                return chat(request)
            case "/server_info" if dev_mode:
                config = {"environment": "." * 500_000, "model_config": {"logprobs_mode": f"{mode}_logprobs"}}
                return page({"vllm_config": config})
            case _:
                return page({"error": "not found"}, status=404)

    def chat(request: ReceivedRequest) -> Response:
        body = request.body
        if body["model"] != model:
            return page({"error": {"message": f"The model `{body['model']}` does not exist."}}, status=404)
        if body.get("tools") and refuses_tools:
            return page({"error": {"message": refuses_tools}}, status=400)
        if forgets and len(request.messages) > 1:
            request = ReceivedRequest(
                method=request.method, path=request.path, headers=request.headers,
                body={**body, "messages": request.messages[1:]},
            )  # fmt: skip
        message = calling(tool_call("weather", {"city": "Oslo"})) if body.get("tools") else "ab"
        message = chr(next(letters)) if flat else message
        response = json.loads(answer(request, message, routed=routed))
        scale = 1.0 if mode == "raw" else body.get("temperature", 1.0)
        for token in response["choices"][0]["logprobs"]["content"]:
            token["logprob"] /= scale
        return page(response)

    return respond


def page(content: Any, status: int = 200) -> Response:
    return Response(body=json.dumps(content, separators=(",", ":")).encode(), status=status)


def examined(
    respond: Respond, *, weights: str | None = "default", metrics: Callable[[], str] | str = "", **settings: Any
) -> tuple[dict[str, Finding], Examination]:
    findings: dict[str, Finding] = {}
    with serving(respond) as server:
        server.weights, server.metrics = weights, metrics
        examination = Examination(RunConfig(engine=quick_engine(server.url, **settings)))

        async def main() -> None:
            async for finding in examination.findings():
                findings[finding.what] = finding

        run(main)
    return findings, examination


def stage_of(client: EngineClient) -> PlayResources:
    store = open_store("memory://quick")
    return PlayResources(client=client, store=store, settings=Policy(), dialect=dialect_of(client.settings))


def noted_at_a_start(respond: Respond, **settings: Any) -> list[Finding]:
    """What the quick part says. Raises what it refuses."""
    noted: list[Finding] = []
    with serving(respond) as server:

        async def main() -> None:
            async with EngineClient.open(quick_engine(server.url, **settings)) as client:
                noted.extend(await quick(stage_of(client)))

        run(main)
    return noted


def refused(respond: Respond, **settings: Any) -> str | None:
    try:
        noted_at_a_start(respond, **settings)
    except (StageError, InfrastructureFailure) as error:
        return str(error)
    return None


def test_a_good_engine_has_no_problem() -> None:
    findings, examination = examined(engine(routed=True), routed_experts=True)
    assert {finding.level for finding in findings.values()} <= {Level.OK, Level.NOTE}
    assert [name for name, finding in findings.items() if finding.level is Level.NOTE] == ["length"]
    assert findings["server"].text.endswith("is vllm 0.32.0")
    assert "version 'default'" in findings["versions"].text
    assert examination.block().splitlines()[2:] == [
        'model = "policy"', 'dialect = "vllm"', 'logprobs_mode = "processed"', "routed_experts = true",
        "hidden_layers = 3", "experts_per_token = 2",
    ]  # fmt: skip
    assert refused(engine(routed=True), routed_experts=True) is None


@pytest.mark.parametrize(
    ("respond", "settings", "what", "fix"),
    [
        (engine(model="qwen"), {}, "model", "--served-model-name policy"),
        (engine(mode="raw"), {}, "logprobs", "--logprobs-mode processed_logprobs"),
        (engine(), {"logprobs_mode": "raw"}, "logprobs", 'engine.logprobs_mode = "processed"'),
        (engine(), {"routed_experts": True}, "experts", "--enable-return-routed-experts"),
        (engine(owned_by="sglang"), {}, "dialect", 'engine.dialect = "sglang"'),
        (engine(routed=True, version="0.20.1"), {"routed_experts": True}, "version", "0.22 or later"),
        (engine(dev_mode=False), {"weight_update": "headpond"}, "weights", "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_what_spoils_every_rollout_is_named_with_the_flag_and_refused_at_a_start(
    respond: Respond, settings: dict[str, Any], what: str, fix: str
) -> None:
    findings, _ = examined(respond, **settings)
    assert findings[what].level is Level.WRONG
    assert fix in findings[what].fix
    said = refused(respond, **settings)
    assert said is not None
    assert fix in said


def test_tools_that_the_server_refuses_are_a_note_in_its_words() -> None:
    findings, _ = examined(engine(refuses_tools=NO_PARSER))
    assert findings["tools"].level is Level.NOTE
    assert "requires --enable-auto-tool-choice" in findings["tools"].text
    assert findings["turns"].level is Level.OK
    assert refused(engine(refuses_tools=NO_PARSER)) is None
    (noted,) = noted_at_a_start(engine(refuses_tools=NO_PARSER))
    assert "requires --enable-auto-tool-choice" in noted.sentence
    assert noted_at_a_start(engine()) == []


def test_a_prompt_with_tools_that_is_too_long_stops_no_run_and_asks_for_no_parser() -> None:
    (noted,) = noted_at_a_start(engine(refuses_tools=TOO_LONG))
    assert "environments with tools fail: context limit: " in noted.sentence
    assert "--tool-call-parser" not in noted.sentence


@pytest.mark.parametrize("dev_mode", [True, False], ids=["the server says it", "not known"])
def test_the_mode_of_a_flat_policys_logprobs_is_what_the_server_says(dev_mode: bool) -> None:
    """No token is drawn at both temperatures."""
    respond = engine(mode="raw", flat=True, dev_mode=dev_mode)
    findings, examination = examined(respond)
    assert findings["logprobs"].level is (Level.WRONG if dev_mode else Level.NOTE)
    assert ('logprobs_mode = "raw"' in examination.block()) is dev_mode
    assert ("--logprobs-mode processed_logprobs" in (refused(respond) or "")) is dev_mode
    assert refused(engine(flat=True, dev_mode=dev_mode)) is None


def test_the_shape_of_routed_experts_is_that_of_the_models_own_configuration(tmp_path: Path) -> None:
    """SGLang's rows of 3 layers and 2 experts divide as well into 2 and 3."""
    shape = {"num_hidden_layers": 3, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": shape}))
    respond = engine(routed=True, root=str(tmp_path))
    right = {"routed_experts": True, "hidden_layers": 3, "experts_per_token": 2}
    for wrong in ({"hidden_layers": 2}, {"experts_per_token": 3}, {"hidden_layers": 2, "experts_per_token": 3}):
        findings, _ = examined(respond, **(right | wrong))
        assert findings["shape"].level is Level.WRONG
        assert findings["shape"].fix == "set engine.hidden_layers = 3 and engine.experts_per_token = 2"
        assert "engine.hidden_layers = 3" in (refused(respond, **(right | wrong)) or "")
    findings, _ = examined(respond, **right)
    assert findings["shape"].level is Level.OK
    assert refused(respond, **right) is None
    for unreadable in ("no JSON", "[]", '{"text_config": null}', '{"num_hidden_layers": "3"}'):
        (tmp_path / "config.json").write_text(unreadable)
        assert "shape" not in examined(respond, **right)[0]


def test_routed_experts_of_a_dense_model_are_noted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))
    findings, _ = examined(engine(routed=True, root=str(tmp_path)), routed_experts=True)
    assert "the model is dense" in findings["shape"].text


def test_a_template_that_rewrites_history_is_noted() -> None:
    findings, _ = examined(engine(forgets=True))
    assert findings["turns"].level is Level.NOTE
    assert "policy.renderer" in findings["turns"].fix


def test_a_server_without_control_endpoints_is_noted() -> None:
    """Who only loads weights by the trainer's own way may not need them."""
    findings, _ = examined(engine(dev_mode=False), weights=None)
    assert (findings["versions"].level, findings["weights"].level) == (Level.NOTE, Level.NOTE)
    assert "VLLM_SERVER_DEV_MODE=1" in findings["versions"].fix
    assert "/pause, /update_weight_version, /collective_rpc" in findings["weights"].text


@pytest.mark.parametrize(
    ("weights", "served", "settings", "said", "call"),
    [
        ("31@658de159a72b", "policy", {}, "only run 658de159a72b can be resumed", "/collective_rpc"),
        ("20", "policy", {}, "a new run starts with version 20", "/collective_rpc"),
        ("default", "31@658de159a72b", LORA, "only run 658de159a72b can be", "/v1/unload_lora_adapter"),
    ],
)  # fmt: skip
def test_weights_of_an_earlier_run_are_noted_with_the_calls_that_load_the_first_ones(
    weights: str, served: str, settings: dict[str, Any], said: str, call: str
) -> None:
    findings, _ = examined(engine(model=served), weights=weights, **settings)
    assert findings["versions"].level is Level.NOTE
    assert said in findings["versions"].text
    assert 'section "Weights of an earlier run"' in findings["versions"].fix
    assert call in findings["versions"].fix


def test_a_router_is_noted_before_versions_differ() -> None:
    pages = itertools.cycle(f"vllm:num_requests_waiting 0\nprocess_start_time_seconds {at}\n" for at in (1.0, 2.0))
    findings, _ = examined(engine(), metrics=lambda: next(pages))
    assert findings["router"].level is Level.NOTE
    assert "2 servers answer at" in findings["router"].text
    assert "router" not in examined(engine(), metrics=lambda: "vllm:num_requests_waiting 0\n")[0]


def test_an_unreachable_engine_is_not_a_wrong_setting_of_a_start() -> None:
    async def main() -> None:
        async with EngineClient.open(quick_engine("http://127.0.0.1:1")) as client:
            stage = PlayResources(
                client=client,
                store=open_store("memory://quick"),
                settings=Policy(),
                dialect=dialect_of(client.settings),
            )
            with pytest.raises(EngineUnreachable, match=r"engine\.urls"):
                await quick(stage)

    run(main)
    findings: list[Finding] = []

    async def examine() -> None:
        examination = Examination(RunConfig(engine=quick_engine("http://127.0.0.1:1")))
        findings.extend([finding async for finding in examination.findings()])

    run(examine)
    assert [(finding.level, finding.what) for finding in findings] == [(Level.WRONG, "server")]
