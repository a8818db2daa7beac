"""Facts that a server reports: its kind, version, models and flags. Every answer may be missing."""

import asyncio
import contextlib
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from headpond.config.engine import Engine
from headpond.doctor.findings import Finding, note, ok, wrong
from headpond.engines.dialects import load_dialect
from headpond.engines.http.transport import open_http
from headpond.engines.replicas.control import UNREACHABLE, EngineControl, WeightLabel, read_page, reload_advice
from headpond.errors import EngineUnreachable
from headpond.event_loop.offload import in_file_thread

ANSWER_S = 20.0  # for a page that costs the server nothing
PAGE_BYTES = 4 << 20
LOOKS = 4  # questions which process answers: a router that picks one of two at random is missed in 1 of 8 cases
# First releases that send routed experts in a form that is read: see docs/engines.md.
OLDEST = {"vllm": (0, 22), "sglang": (0, 5, 19)}
# Names of settings that decide what can be recorded, as vLLM and SGLang print them.
FLAGS = (
    "logprobs_mode",
    "enable_return_routed_experts",
    "enable_prefix_caching",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
)


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    url: str
    kind: str | None = None  # `vllm`, `sglang` or the server's own name for itself
    version: str | None = None
    # name -> longest sequence, if stated
    models: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    weights: str | None = None  # directory or name of the weights that the server has begun with
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weight_version: str | None = None  # version of the weights, as the server reports it
    # paths that `engine.weight_update = "headpond"` would need and the server does not have
    absent_calls: tuple[str, ...] = ()
    # number of processes that answered at the address; 0 if the server does not report it
    processes: int = 0
    # shape from the model's config.json, where this host can read it
    shape: "ModelShape | None" = None

    @property
    def logprobs_mode(self) -> str | None:
        """Return the mode that the server reports (vLLM with VLLM_SERVER_DEV_MODE=1), as in `engine.logprobs_mode`."""
        stated = str(self.flags.get("logprobs_mode", ""))
        return next((mode for mode in ("raw", "processed") if stated.lower().endswith(f"{mode}_logprobs")), None)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    path: Path
    hidden_layers: int
    experts_per_token: int | None  # None for a dense model


async def read_facts(settings: Engine, url: str) -> ServerFacts:
    """EngineUnreachable if no connection can be made."""
    async with open_http(settings) as http:
        try:
            models = await _json(http, f"{url}/v1/models")
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            number = error.errno if isinstance(error, OSError) else None
            why = os.strerror(number) if number else str(error) or type(error).__name__
            raise EngineUnreachable(f"{url} cannot be reached ({why}): is it running, is engine.urls right?") from error
        version, info, weights, model_info, absent_calls = await asyncio.gather(
            _quietly(http, f"{url}/version"),
            _quietly(http, f"{url}/server_info?config_format=json"),
            _quietly(http, f"{url}/weight_info"),
            _quietly(http, f"{url}/model_info"),
            _absent_calls(http, url, settings),
        )
    served = [each for each in _list(models.get("data")) if isinstance(each.get("id"), str)]
    roots = model_info.get("model_path"), *(each.get("root") for each in served[:1])
    stated = weights.get("weight_version", weights.get("version", model_info.get("weight_version")))
    return ServerFacts(
        url=url,
        kind=str(served[0].get("owned_by")) if served and served[0].get("owned_by") else None,
        version=_text(version.get("version") or info.get("version")),
        models={each["id"]: _number(each.get("max_model_len")) for each in served},
        weights=_text(model_info.get("model_path") or (served[0].get("root") if served else None)),
        flags=_flags(info),
        weight_version=_text(stated),
        absent_calls=absent_calls,
        processes=await _processes(settings, url),
        shape=await in_file_thread(_model_shape, [root for root in roots if isinstance(root, str)]),
    )


def _model_shape(directories: Sequence[str]) -> ModelShape | None:
    """Read the first config.json that this host has. A model's name on a hub is no directory."""
    for directory in directories:
        path = Path(directory) / "config.json"
        with contextlib.suppress(OSError, ValueError):
            if not path.is_absolute() or path.stat().st_size > PAGE_BYTES:
                continue
            page = orjson.loads(path.read_bytes())
            given = next((part for part in _parts(page) if _number(part.get("num_hidden_layers"))), {})
            if layers := _number(given.get("num_hidden_layers")):
                experts = _number(given.get("num_experts_per_tok"))
                return ModelShape(path=path, hidden_layers=layers, experts_per_token=experts)
    return None


def _parts(config: Any) -> list[dict[str, Any]]:
    """Where a model's config.json may have its numbers: `text_config` of a model that also sees."""
    return _list([config.get("text_config"), config]) if isinstance(config, dict) else []


async def _absent_calls(http: aiohttp.ClientSession, url: str, settings: Engine) -> tuple[str, ...]:
    """OPTIONS changes nothing, and is answered with 404 where there is no such path."""
    calls = load_dialect(settings.dialect).control
    if settings.lora:
        needed = [*calls.load_adapter("", ""), *calls.unload_adapter("")]
    else:
        needed = [*calls.pause(""), *calls.load("", ""), *calls.resume(None)]
    absent: list[str] = []
    for path in dict.fromkeys(call.path.partition("?")[0] for call in needed):
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(ANSWER_S), http.options(url + path) as response:
                if response.status == 404:
                    absent.append(path)
    return tuple(absent)


async def _processes(settings: Engine, url: str) -> int:
    """Each question over a connection of its own, as a balancer of connections would distribute them."""
    started = set[float]()
    async with EngineControl.open(settings) as control:
        for _ in range(LOOKS):
            with contextlib.suppress(*UNREACHABLE):
                load = await control.busyness(url)
                started |= {load.started_at} if load and load.started_at is not None else set()
    return len(started)


async def _json(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Empty if the page does not exist or is no JSON object."""
    async with asyncio.timeout(ANSWER_S), http.get(url, allow_redirects=False) as response:
        body = await read_page(response, PAGE_BYTES)
    if response.status != 200:
        return {}
    try:
        page = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return page if isinstance(page, dict) else {}


async def _quietly(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    try:
        return await _json(http, url)
    except (aiohttp.ClientError, TimeoutError):
        return {}


def _flags(info: Any, depth: int = 4) -> dict[str, Any]:
    """The FLAGS anywhere in a server's nested description of itself."""
    found: dict[str, Any] = {}
    if isinstance(info, dict) and depth:
        for name, value in info.items():
            if name in FLAGS and not isinstance(value, dict):
                found[name] = value
            else:
                found |= _flags(value, depth - 1)
    return found


def _list(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int) else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def check_model(facts: ServerFacts, settings: Engine) -> Finding:
    model, names = settings.model, list(facts.models)
    if not names:
        return note("model", f"{facts.url} does not list its models, so engine.model = {model!r} is not checked")
    if model in names:
        return ok("model", f"{model!r} is served")
    near = (difflib.get_close_matches(model, names, n=1) or names)[0]
    return wrong(
        "model",
        f"{facts.url} serves {', '.join(map(repr, names[:8]))}, not engine.model = {model!r}",
        f"set engine.model = {near!r}, or start the server with --served-model-name {model}",
    )


def check_kind(facts: ServerFacts, settings: Engine) -> list[Finding]:
    described = " ".join(filter(None, (facts.kind or "an unknown server", facts.version)))
    findings = [ok("server", f"{facts.url} is {described}")]
    if facts.kind == "sglang" and settings.dialect in ("vllm", "generate"):
        findings.append(wrong("dialect", "the server is SGLang", 'set engine.dialect = "sglang"'))
    if facts.kind == "vllm" and settings.dialect == "sglang":
        findings.append(wrong("dialect", "the server is vLLM", 'set engine.dialect = "vllm"'))
    release, oldest = _release(facts), OLDEST.get(facts.kind or "")
    if settings.routed_experts and release and oldest and release < oldest:
        text = f"{facts.kind} {facts.version} does not send routed experts in a form that can be read"
        findings.append(wrong("version", text, f"update it to {'.'.join(map(str, oldest))} or later"))
    if facts.processes > 1:
        findings.append(
            note(
                "router",
                f"{facts.processes} servers answer at {facts.url}: which of them sampled a token is not known, so no "
                "version is exact, and a conversation may lose its cached prefix",
                "name the servers themselves in engine.urls",
            )
        )
    return findings


def _release(facts: ServerFacts) -> tuple[int, ...]:
    """Return the release as numbers; empty if the server reports none."""
    match = re.match(r"v?(\d+(?:\.\d+)+)", facts.version or "")
    return tuple(map(int, match[1].split("."))) if match else ()


def check_shape(facts: ServerFacts, settings: Engine) -> list[Finding]:
    """The configured shape of routed experts: rows of SGLang carry none, and a wrong one may divide them as well."""
    if not settings.routed_experts or facts.shape is None:
        return []
    path, layers, topk = facts.shape.path, facts.shape.hidden_layers, facts.shape.experts_per_token
    if topk is None:
        text = f"engine.routed_experts = true, and {path} has no num_experts_per_tok: the model is dense"
        return [note("shape", text, "set engine.routed_experts = false")]
    asked = settings.hidden_layers or layers, settings.experts_per_token or topk
    if asked == (layers, topk):
        return [ok("shape", f"{layers} hidden layers and {topk} experts per token, as {path} says")]
    return [
        wrong(
            "shape",
            f"engine.hidden_layers and engine.experts_per_token are {asked[0]} and {asked[1]}, and {path} has "
            f"{layers} and {topk}",
            f"set engine.hidden_layers = {layers} and engine.experts_per_token = {topk}",
        )
    ]


def check_control(facts: ServerFacts, settings: Engine) -> list[Finding]:
    """Versions, and the calls that load weights."""
    hint = load_dialect(settings.dialect).control.hint
    if facts.weight_version is None:
        text = f"{facts.url} does not say which version its weights have"
        versions = note("versions", text, f'{hint}; or set engine.versions = "announced"')
    else:
        versions = _check_version(facts, settings)
    if not facts.absent_calls:
        return [versions, ok("weights", "the endpoints that load weights are there")]
    text = f"{facts.url} has no {', '.join(facts.absent_calls)}, with which weights are loaded"
    level = wrong if settings.weight_update == "headpond" else note
    return [versions, level("weights", text, hint)]


def _check_version(facts: ServerFacts, settings: Engine) -> Finding:
    """Weights of an earlier run, which a new one would refuse or begin with."""
    text = facts.weight_version or ""
    label = WeightLabel(text) if settings.lora else WeightLabel.parse(text)
    if settings.lora:
        adapters = [WeightLabel.parse(name) for name in facts.models]
        label = next((adapter for adapter in reversed(adapters) if adapter.run), label)
    text = f"{facts.url} says that its weights have version {label.text!r}"
    if settings.versions != "reported" or not (label.run or label.version):
        return ok("versions", text)
    advice = reload_advice(settings)
    if label.run:
        return note("versions", f"{text}: only run {label.run} can be resumed, another one stops", f"else {advice}")
    return note(
        "versions",
        f"{text}: a new run starts with version {label.version}, and its trainer counts on from there",
        f"if the trainer begins with other weights, {advice}",
    )


def check_length(facts: ServerFacts, settings: Engine, max_seq_len: int) -> list[Finding]:
    longest = facts.models.get(settings.model)
    if longest is None or longest >= max_seq_len:
        return []
    return [
        note(
            "length",
            f"the server ends sequences at {longest:,} tokens, policy.max_seq_len is {max_seq_len:,}",
            f"set policy.max_seq_len = {longest}, or start the server with a larger --max-model-len",
        )
    ]
