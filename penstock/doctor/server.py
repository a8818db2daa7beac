"""What a server says of itself: its kind, version, models and flags. Every answer may be missing."""

import asyncio
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from penstock.config.engine import Engine
from penstock.doctor.findings import Finding, note, ok, wrong
from penstock.engines.transport import open_http
from penstock.errors import EngineUnreachable

ANSWER_S = 20.0  # for a page that costs the server nothing
PAGE_BYTES = 4 << 20
FLAGS = (
    "logprobs_mode",
    "enable_return_routed_experts",
    "enable_prefix_caching",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
)
"""Names of settings that decide what can be recorded, as vLLM and SGLang print them."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    url: str
    kind: str | None = None
    """`vllm`, `sglang` or what the server calls itself"""
    version: str | None = None
    models: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    """name -> longest sequence, if stated"""
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weight_version: str | None = None
    """what the server says about its weights"""


async def read_facts(settings: Engine, url: str) -> ServerFacts:
    """EngineUnreachable if no connection can be made."""
    async with open_http(settings) as http:
        try:
            models = await _json(http, f"{url}/v1/models")
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise EngineUnreachable(
                f"{url} cannot be reached ({error!r}): is it running, is engine.urls right?"
            ) from error
        version, info, weights, model_info = await asyncio.gather(
            _quietly(http, f"{url}/version"),
            _quietly(http, f"{url}/server_info?config_format=json"),
            _quietly(http, f"{url}/weight_info"),
            _quietly(http, f"{url}/model_info"),
        )
    served = [each for each in _list(models.get("data")) if isinstance(each.get("id"), str)]
    stated = weights.get("weight_version", weights.get("version", model_info.get("weight_version")))
    return ServerFacts(
        url=url,
        kind=str(served[0].get("owned_by")) if served and served[0].get("owned_by") else None,
        version=_text(version.get("version") or info.get("version")),
        models={each["id"]: _number(each.get("max_model_len")) for each in served},
        flags=_flags(info),
        weight_version=_text(stated),
    )


async def _json(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Empty if the page does not exist or is no JSON object."""
    async with asyncio.timeout(ANSWER_S), http.get(url, allow_redirects=False) as response:
        body = await response.content.read(PAGE_BYTES)
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
    return findings


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
