"""The strict reference for reading responses: all of the JSON and base64, Python lists, no shortcuts.

By contract, base64 of rows that are recorded already is not checked.
"""

import base64
import binascii
import json
import math
import re
from dataclasses import dataclass
from typing import Any, Never

import numpy as np

MAX_ID = 2**31 - 1
NO_LOGPROB = -9999.0
FLOAT32_MIN = -3.4028234663852886e38
SIZES = {"uint8": 1, "uint16": 2, "uint32": 4, "int16": 2, "int32": 4, "int64": 8}
NPY = re.compile(
    rb"\{'descr': '[|<]([ui][1248])', 'fortran_order': False, 'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n"
)


class Rejected(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class ReadInputs:
    """What a response is read with."""

    dialect: str = "vllm"
    open_samples: list[tuple[list[int], int]]
    """Sequences of open samples, and the first row that each still needs."""
    prompt: list[int] | None = None
    routes_from: int = 0
    max_seq_len: int | None = None
    layers: int | None = None
    topk: int | None = None
    experts: int | None = None
    wire: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReferenceTurn:
    extends: int | None
    matches: int
    prefix_tokens: int
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    untrained: list[int]
    """Completion tokens without a logprob."""
    rows: dict[int, list[list[int]]]
    """By token position; rows of zeros, where top-k is above 1, are left out."""
    finish_reason: str | None
    version: int | None
    spans: list[tuple[int, int, int]]
    """(version, start, end) of the completion"""
    message: Any
    truncated: bool
    overlong_prompt: bool


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Rejected(what)


def read(body: bytes, inputs: ReadInputs) -> ReferenceTurn:
    response = parsed(body)
    choice = only_choice(response)
    sglang = inputs.dialect == "sglang"
    meta_info = (choice.get("meta_info") or {}) if sglang else {}
    check_shapes(choice, inputs.dialect)
    prompt = (choice if sglang else response).get("prompt_token_ids")
    prompt = inputs.prompt if prompt is None else ids(prompt)
    need(prompt is not None and len(prompt) > 0, "prompt")
    assert prompt is not None
    completion, logprobs = sglang_completion(meta_info) if sglang else completed(choice, inputs.dialect)
    matching = [i for i, (held, _) in enumerate(inputs.open_samples) if held and prompt[: len(held)] == held]
    extends = max(matching, key=lambda i: len(inputs.open_samples[i][0])) if matching else None
    held, rows_from = ([], 0) if extends is None else inputs.open_samples[extends]
    tokens = len(prompt) + len(completion)
    limit = tokens if inputs.max_seq_len is None else inputs.max_seq_len
    need(choice.get("finish_reason") != "abort" and ended(meta_info) != "abort", "aborted")
    need(inputs.dialect != "vllm" or response.get("prompt_routed_experts") is None, "too old")
    need(not sglang or (response.get("sglext") or {}).get("routed_experts") is None, "too old")
    payload = (meta_info if sglang else choice).get("routed_experts")
    rows = {} if payload is None else routed(payload, tokens, rows_from, inputs)
    kept = max(0, limit - len(prompt))
    return ReferenceTurn(
        extends=extends,
        matches=len(matching),
        prefix_tokens=len(held),
        prompt=prompt[len(held) : limit],
        completion=completion[:kept],
        logprobs=[float(np.float32(value)) if value > NO_LOGPROB else 0.0 for value in logprobs[:kept]],
        untrained=[at for at, value in enumerate(logprobs[:kept]) if value <= NO_LOGPROB],
        rows={at: row for at, row in rows.items() if at < min(tokens, limit)},
        finish_reason=choice.get("finish_reason"),
        version=version(meta_info.get("weight_version")),
        spans=spans((meta_info if sglang else choice).get("weight_versions"), len(completion), kept),
        message=None if inputs.dialect == "generate" else choice["message"],
        truncated=tokens > limit,
        overlong_prompt=len(prompt) > limit,
    )


def ended(meta_info: dict[str, Any]) -> Any:
    return (meta_info.get("finish_reason") or {}).get("type")


def parsed(body: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> Never:
        raise Rejected(constant)

    try:
        response = json.loads(body.decode(), parse_constant=refuse)
        json.dumps(response, ensure_ascii=False).encode()  # finds half surrogate pairs
    except (UnicodeError, ValueError, RecursionError) as error:
        raise Rejected("not JSON") from error
    need(isinstance(response, dict), "not an object")
    return response


def only_choice(response: dict[str, Any]) -> dict[str, Any]:
    choices = response.get("choices")
    need(isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict), "choices")
    assert isinstance(choices, list)
    return choices[0]


def check_shapes(choice: dict[str, Any], dialect: str) -> None:
    need(isinstance(choice.get("finish_reason"), str | None), "finish_reason")
    if dialect == "generate":
        check_spans(choice.get("weight_versions"))
    if dialect == "sglang":
        need(isinstance(choice.get("meta_info"), dict | None), "meta_info")
        check_meta_info(choice.get("meta_info") or {})
    elif choice.get("logprobs") is not None:
        listed(choice["logprobs"], dialect)
    if dialect != "generate":
        check_message(choice.get("message"))


def check_meta_info(meta_info: dict[str, Any]) -> None:
    need(type(meta_info.get("completion_tokens")) in (int, type(None)), "completion_tokens")
    reason = meta_info.get("finish_reason")
    need(isinstance(reason, dict | None) and isinstance((reason or {}).get("type"), str | None), "finish_reason")
    if meta_info.get("weight_version") is not None:
        check_version(meta_info["weight_version"])
    check_spans(meta_info.get("weight_versions"))


def check_spans(stated: Any) -> None:
    need(isinstance(stated, list | None), "weight_versions")
    for span in stated or []:
        need(isinstance(span, dict) and {"version", "start", "end"} <= span.keys(), "a span")
        check_version(span["version"])
        need(type(span["start"]) is int and type(span["end"]) is int, "bounds of a span")


def check_version(stated: Any) -> None:
    need(isinstance(stated, str) or (type(stated) is int and 0 <= stated <= MAX_ID), "a version")
    need(re.fullmatch("(loading|failed) [0-9]{1,10}(@[A-Za-z0-9_-]{1,100})?", str(stated)) is None, "not loaded")


def check_message(message: Any) -> None:
    need(isinstance(message, dict), "message")
    calls = message.get("tool_calls")
    need(isinstance(message.get("content"), str | None), "content")
    need(calls is None or (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)), "calls")
    need("content" in message or bool(calls), "neither content nor calls")


def sglang_completion(meta_info: dict[str, Any]) -> tuple[list[int], list[float]]:
    pairs = output_tokens(meta_info.get("output_token_logprobs"))
    need(meta_info.get("completion_tokens") == len(pairs), "completion_tokens")
    return [token for _, token in pairs], [value for value, _ in pairs]


def completed(choice: dict[str, Any], dialect: str) -> tuple[list[int], list[float]]:
    need(choice.get("token_ids") is not None and choice.get("logprobs") is not None, "tokens")
    tokens, named = ids(choice["token_ids"]), listed(choice["logprobs"], dialect)
    need(len(tokens) == len(named), "lengths")
    if dialect == "generate":
        by_id = bool(named) and named[0][0].get("token_id") is not None
        need(all(names(entry, token, by_id) for token, (entry, _) in zip(tokens, named, strict=True)), "names")
    return tokens, [value for _, value in named]


def names(entry: dict[str, Any], token: int, by_id: bool) -> bool:
    return entry.get("token_id") == token if by_id else entry.get("token") == f"token_id:{token}"


def listed(logprobs: Any, dialect: str) -> list[tuple[Any, float]]:
    need(isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list), "logprobs")
    entries = logprobs["content"]
    need(all(isinstance(entry, dict) for entry in entries), "logprobs.content")
    if dialect == "generate":
        need(all(isinstance(entry.get("token"), str | None) for entry in entries), "token")
        ids([entry["token_id"] for entry in entries if entry.get("token_id") is not None])
    return [(entry, logprob(entry.get("logprob"))) for entry in entries]


def output_tokens(tokens: Any) -> list[tuple[float, int]]:
    need(isinstance(tokens, list), "output_token_logprobs")
    need(all(isinstance(token, list) and len(token) >= 2 for token in tokens), "output_token_logprobs")
    return [(logprob(token[0]), ids([token[1]])[0]) for token in tokens]


def ids(values: Any) -> list[int]:
    need(isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_ID for value in values), "ids")
    return values


def logprob(value: Any) -> float:
    need(type(value) in (int, float), "logprob")
    try:
        number = float(value)
    except OverflowError as error:
        raise Rejected("logprob") from error
    need(math.isfinite(number) and FLOAT32_MIN <= number <= 1e-3, "logprob")
    return number


def version(stated: str | int | None) -> int | None:
    if isinstance(stated, str):
        number = re.fullmatch("([0-9]{1,10})(@[A-Za-z0-9_-]{1,100})?", stated)
        return int(number[1]) if number and int(number[1]) <= MAX_ID else None
    return stated


def spans(stated: list[dict[str, Any]] | None, tokens: int, kept: int) -> list[tuple[int, int, int]]:
    """(version, start, end) of the first `kept` tokens; empty if no version is named."""
    if not stated or all(version(span["version"]) is None for span in stated):
        return []
    covered = [token for span in stated for token in range(span["start"], min(span["end"], tokens + 1))]
    need(covered == list(range(tokens)) and all(0 <= span["start"] <= span["end"] for span in stated), "spans")
    need([span["start"] for span in stated[1:]] == [span["end"] for span in stated[:-1]], "spans")
    return [
        (version(span["version"]) or 0, span["start"], min(span["end"], kept))
        for span in stated
        if span["start"] < kept
    ]


def first_not_none(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def routed(payload: Any, tokens: int, rows_from: int, inputs: ReadInputs) -> dict[int, list[list[int]]]:
    if isinstance(payload, dict):
        shape, wire = payload.get("shape"), first_not_none(payload.get("dtype"), "uint8")
        need(isinstance(shape, list) and len(shape) == 3 and all(type(n) is int and n >= 0 for n in shape), "shape")
        need(isinstance(wire, str) and isinstance(payload.get("data"), str), "data")
        need(type(payload.get("start")) in (int, type(None)) and (payload.get("start") or 0) >= 0, "start")
        start = start_of(shape[0], payload.get("start"), tokens, inputs)
        new = from_base64(payload["data"], 0, shape, wire, start, rows_from)
    else:
        need(isinstance(payload, str), "neither text nor object")
        header_bytes, shape, wire = npy_or_bare(payload, tokens, inputs)
        start = start_of(shape[0], None, tokens, inputs)
        new = from_base64(payload, header_bytes, shape, wire, start, rows_from)
    agree(shape[1], shape[2], wire, inputs)
    return checked(new, shape[2], wire, inputs)


def start_of(rows: int, stated: int | None, tokens: int, inputs: ReadInputs) -> int:
    starts = [inputs.routes_from, 0] if stated is None else [stated]
    fitting = [start for missing in (1, 0) for start in starts if rows == tokens - missing - start]
    need(bool(fitting), "rows")
    return fitting[0]


def npy_or_bare(text: str, tokens: int, inputs: ReadInputs) -> tuple[int, list[int], str]:
    if text.startswith("k05VTVBZ"):
        preamble = decoded(text[:16])
        fixed = 10 if preamble[6:7] == b"\x01" else 12
        header_bytes = fixed + int.from_bytes(preamble[8:fixed], "little")
        match = NPY.fullmatch(decoded(text[: (header_bytes + 2) // 3 * 4])[fixed:header_bytes])
        need(match is not None, "header")
        assert match is not None
        return header_bytes, [int(n) for n in match.groups()[1:]], np.dtype(match[1].decode()).name
    need(inputs.layers is not None and inputs.topk is not None and len(text) % 4 == 0, "bare")
    assert inputs.layers is not None
    assert inputs.topk is not None
    size = len(text) // 4 * 3 - text[-2:].count("=")
    for missing in (1, 0):
        for start in (inputs.routes_from, 0):
            rows = tokens - missing - start
            if rows >= 0 and rows * inputs.layers * inputs.topk * 4 == size:
                return 0, [rows, inputs.layers, inputs.topk], "int32"
    raise Rejected("bare size")


def from_base64(
    text: str, header_bytes: int, shape: list[int], wire: str, start: int, rows_from: int
) -> dict[int, list[list[int]]]:
    need(wire in SIZES and shape[1] > 0 and shape[2] > 0, "shape or dtype")
    row_bytes = shape[1] * shape[2] * SIZES[wire]
    size = header_bytes + shape[0] * row_bytes
    need(len(text) == (size + 2) // 3 * 4, "length")
    first = max(start, rows_from)
    if first >= start + shape[0]:
        return {}
    held = (header_bytes + (first - start) * row_bytes) // 3 * 4
    data = decoded("A" * held + text[held:])
    need(len(data) == size, "padding")
    values = np.frombuffer(data[header_bytes:], wire).reshape(shape)
    return {at: values[at - start].tolist() for at in range(first, start + shape[0])}


def decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Rejected("base64") from error


def agree(layers: int, topk: int, wire: str, inputs: ReadInputs) -> None:
    for stated, before in [(layers, inputs.layers), (topk, inputs.topk), (wire, inputs.wire)]:
        need(before is None or stated == before, "not as before")
    need(layers > 0 and topk > 0 and wire in SIZES, "shape or dtype")
    highest = {"uint8": 255, "int16": 32767}.get(wire, 65535)
    need(inputs.experts is None or inputs.experts - 1 <= highest, "too narrow")


def checked(rows: dict[int, list[list[int]]], topk: int, wire: str, inputs: ReadInputs) -> dict[int, list[list[int]]]:
    narrow = wire == "uint8" or (inputs.experts is not None and inputs.experts <= 256)
    experts = inputs.experts or (256 if narrow else 65536)
    captured = {}
    for at, row in rows.items():
        flat = [expert for layer in row for expert in layer]
        need(all(0 <= expert < experts for expert in flat), "expert id")
        if topk == 1 or any(flat):
            captured[at] = row
    return captured
