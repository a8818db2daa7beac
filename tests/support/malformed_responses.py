"""Malformed responses, each with a part of the message that rejects it, and random mutations of bodies."""

import copy
import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.engine_responses import ResponseSpec, compact, routed

PROMPT = [11, 12, 13, 14]
COMPLETION = [21, 22, 23]
LAYERS, TOPK = 2, 2
ROWS = np.arange(1, 1 + 6 * LAYERS * TOPK, dtype=np.uint8).reshape(6, LAYERS, TOPK)
"""One per token except the last."""


@dataclass(frozen=True, kw_only=True)
class Malformed:
    name: str
    dialect: str
    body: bytes
    message: str
    """Part of the error message."""


class Removed:
    """In place of a value: the key is removed."""


def valid_response(dialect: str, form: str = "object") -> ResponseSpec:
    split = [{"version": "6", "start": 0, "end": 1}, {"version": "7@r1", "start": 1, "end": len(COMPLETION)}]
    return ResponseSpec(prompt=PROMPT, completion=COMPLETION, rows=ROWS, dialect=dialect, form=form, versions=split)


def changed(response: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a path such as `choices.0.logprobs`."""
    response = copy.deepcopy(response)
    *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    at: Any = response
    for step in parents:
        at = at[step]
    if value is Removed:
        del at[last]
    else:
        at[last] = value
    return response


MESSAGE = "choices.0.message"
LOGPROBS = "choices.0.logprobs"
LOGPROB = "choices.0.logprobs.content.1.logprob"
IDS = "choices.0.token_ids"
EXPERTS = "choices.0.routed_experts"
META = "choices.0.meta_info"
OUTPUT = "choices.0.meta_info.output_token_logprobs"

VLLM: list[tuple[str, str, Any, str]] = [
    ("no choices key", "choices", Removed, "choices"),
    ("choices null", "choices", None, "choices"),
    ("choices an object", "choices", {}, "choices"),
    ("choices empty", "choices", [], "0 choices"),
    ("first choice null", "choices.0", None, "choices[0]"),
    ("first choice a list", "choices.0", [], "choices[0]"),
    ("no message", MESSAGE, Removed, "of message"),
    ("message null", MESSAGE, None, "of message"),
    ("message a string", MESSAGE, "hello", "of message"),
    ("content missing, no tool calls", f"{MESSAGE}.content", Removed, "neither content nor tool calls"),
    ("content a number", f"{MESSAGE}.content", 5, "content"),
    ("tool calls an object", f"{MESSAGE}.tool_calls", {}, "tool_calls"),
    ("tool calls of strings", f"{MESSAGE}.tool_calls", ["f"], "tool_calls"),
    ("finish reason a number", "choices.0.finish_reason", 3, "finish_reason"),
    ("no prompt ids", "prompt_token_ids", Removed, "no prompt_token_ids"),
    ("prompt ids null", "prompt_token_ids", None, "no prompt_token_ids"),
    ("prompt ids empty", "prompt_token_ids", [], "empty prompt_token_ids"),
    ("prompt ids an object", "prompt_token_ids", {}, "of prompt_token_ids"),
    ("prompt id a bool", "prompt_token_ids.2", True, "got `bool`"),
    ("prompt id null", "prompt_token_ids.0", None, "got `null`"),
    ("prompt id negative", "prompt_token_ids.1", -1, ">= 0"),
    ("prompt id a float", "prompt_token_ids.3", 14.0, "got `float`"),
    ("prompt id a string", "prompt_token_ids.3", "14", "got `str`"),
    ("prompt id a list", "prompt_token_ids.3", [14], "got `array`"),
    ("prompt id beyond int32", "prompt_token_ids.3", 2**31, "<= 2147483647"),
    ("prompt id beyond int64", "prompt_token_ids.0", 2**70, "<= 2147483647"),
    ("no token ids", IDS, Removed, "no token_ids"),
    ("token ids null", IDS, None, "no token_ids"),
    ("token ids a string", IDS, "21,22,23", "of token_ids"),
    ("token id a bool", f"{IDS}.0", False, "got `bool`"),
    ("token id negative", f"{IDS}.0", -5, ">= 0"),
    ("token id a float", f"{IDS}.0", 21.5, "got `float`"),
    ("token id beyond int32", f"{IDS}.0", 2**31, "<= 2147483647"),
    ("a token id too many", IDS, [*COMPLETION, 24], "4 token_ids but 3 logprobs"),
    ("a token id too few", IDS, COMPLETION[:2], "2 token_ids but 3 logprobs"),
    ("no logprobs", LOGPROBS, Removed, "no token_ids"),
    ("logprobs null", LOGPROBS, None, "no token_ids"),
    ("logprobs a list", LOGPROBS, [], "logprobs"),
    ("logprobs without content", f"{LOGPROBS}.content", Removed, "content"),
    ("logprobs content null", f"{LOGPROBS}.content", None, "content"),
    ("logprob missing", LOGPROB, Removed, "logprob"),
    ("logprob null", LOGPROB, None, "got `null`"),
    ("logprob a bool", LOGPROB, True, "got `bool`"),
    ("logprob a string", LOGPROB, "-0.5", "got `str`"),
    ("logprob above zero", LOGPROB, 0.0011, "<= 0.001"),
    ("logprob one", LOGPROB, 1, "<= 0.001"),
    ("logprob NaN", LOGPROB, float("nan"), "malformed"),
    ("logprob infinite", LOGPROB, float("-inf"), "malformed"),
    ("logprob beyond float32", LOGPROB, -1e39, "logprob"),
    ("experts a number", EXPERTS, 5, "neither base64"),
    ("experts true", EXPERTS, True, "neither base64"),
    ("experts without data", f"{EXPERTS}.data", Removed, "data"),
    ("experts data a number", f"{EXPERTS}.data", 5, "neither base64"),
    ("experts data empty", f"{EXPERTS}.data", "", "0 characters"),
    ("experts not base64", f"{EXPERTS}.data", "!" * 32, "not base64"),
    ("experts url-safe base64", f"{EXPERTS}.data", "-_" * 16, "not base64"),
    ("experts unpadded", f"{EXPERTS}.data", "A" * 31, "31 characters"),
    ("experts padded in the middle", f"{EXPERTS}.data", "AA==" * 8, "base64"),
    ("experts padded too much", f"{EXPERTS}.data", "A" * 30 + "==", "padding"),
    ("experts without shape", f"{EXPERTS}.shape", Removed, "shape"),
    ("experts shape of two", f"{EXPERTS}.shape", [6, 4], "shape"),
    ("experts shape of strings", f"{EXPERTS}.shape", ["6", "2", "2"], "shape"),
    ("experts shape of floats", f"{EXPERTS}.shape", [6.0, 2, 2], "shape"),
    ("experts shape negative", f"{EXPERTS}.shape", [-6, -2, 2], "shape"),
    ("experts shape of no layers", f"{EXPERTS}.shape", [6, 0, 2], "neither can be zero"),
    ("experts shape longer than data", f"{EXPERTS}.shape", [6, 3, 2], "32 characters"),
    ("experts too few rows", EXPERTS, routed(ROWS[:5], "object"), "5 rows"),
    ("experts too many rows", EXPERTS, routed(np.repeat(ROWS, 2, 0)[:8], "object"), "8 rows"),
    ("experts of an unknown type", f"{EXPERTS}.dtype", "float16", "'float16'"),
    ("experts of a type that does not fit", f"{EXPERTS}.dtype", "uint16", "32 characters"),
    ("experts start negative", f"{EXPERTS}.start", -1, "start"),
    ("experts start a bool", f"{EXPERTS}.start", True, "start"),
    ("experts start that does not fit", f"{EXPERTS}.start", 3, "do not fit 7 tokens"),
    ("experts negative ids", EXPERTS, routed(-ROWS.astype(np.int32), "object"), "below 0"),
    ("experts ids beyond 65535", EXPERTS, routed(ROWS.astype(np.int32) + 65536, "object"), "above 65535"),
    ("experts as npy in Fortran order", EXPERTS, routed(np.asfortranarray(ROWS), "npy"), ".npy header"),
    ("experts as npy of floats", EXPERTS, routed(ROWS.astype(np.float32), "npy"), ".npy header"),
    ("experts as npy, big-endian", EXPERTS, routed(ROWS.astype(">u2"), "npy"), ".npy header"),
    ("experts as npy of two dimensions", EXPERTS, routed(ROWS.reshape(6, 4), "npy"), ".npy header"),
    ("experts as npy, cut short", EXPERTS, routed(ROWS, "npy")[:-4], "characters of base64"),
    ("experts as npy, header only", EXPERTS, routed(ROWS, "npy")[:20], ".npy header"),
    ("experts as npy of too few rows", EXPERTS, routed(ROWS[:4], "npy"), "4 rows"),
    ("experts bare, layers unknown", EXPERTS, routed(ROWS, "bare"), "engine.hidden_layers"),
    ("experts as nested lists", EXPERTS, ROWS.tolist(), "nested lists"),
]

SGLANG: list[tuple[str, str, Any, str]] = [
    ("meta_info a string", META, "", "meta_info"),
    ("no meta_info", META, Removed, "no meta_info.output_token_logprobs"),
    ("no output_token_logprobs", OUTPUT, Removed, "no meta_info.output_token_logprobs"),
    ("output_token_logprobs an object", OUTPUT, {}, "output_token_logprobs"),
    ("output token an object", f"{OUTPUT}.0", {"logprob": -1.0}, "output_token_logprobs"),
    ("output token without id", f"{OUTPUT}.0", [-1.0], "output_token_logprobs"),
    ("output token empty", f"{OUTPUT}.0", [], "output_token_logprobs"),
    ("output token id a bool", f"{OUTPUT}.0", [-1.0, True, None], "got `bool`"),
    ("output token id null", f"{OUTPUT}.0", [-1.0, None, None], "got `null`"),
    ("output token id a float", f"{OUTPUT}.0", [-1.0, 21.0, None], "got `float`"),
    ("output token id negative", f"{OUTPUT}.0", [-1.0, -21, None], ">= 0"),
    ("output token logprob null", f"{OUTPUT}.0", [None, 21, None], "got `null`"),
    ("output token logprob a bool", f"{OUTPUT}.0", [False, 21, None], "got `bool`"),
    ("output token logprob NaN", f"{OUTPUT}.0", [float("nan"), 21, None], "malformed"),
    ("output token logprob positive", f"{OUTPUT}.0", [0.5, 21, None], "<= 0.001"),
    ("no completion_tokens", f"{META}.completion_tokens", Removed, "completion_tokens"),
    ("completion_tokens null", f"{META}.completion_tokens", None, "completion_tokens"),
    ("completion_tokens a bool", f"{META}.completion_tokens", True, "completion_tokens"),
    ("completion_tokens a float", f"{META}.completion_tokens", 3.0, "completion_tokens"),
    ("completion_tokens a string", f"{META}.completion_tokens", "3", "completion_tokens"),
    ("completion_tokens too many", f"{META}.completion_tokens", 4, "completion_tokens 4"),
    ("weight_version negative", f"{META}.weight_version", -1, "weight_version"),
    ("weight_version a list", f"{META}.weight_version", [], "weight_version"),
    ("weights that are not loaded", f"{META}.weight_version", "loading 8@r1", "not loaded completely"),
    ("spans a list of numbers", f"{META}.weight_versions", [7], "weight_versions"),
    ("a span that ends early", f"{META}.weight_versions", [{"version": "7", "start": 0, "end": 2}], "do not cover"),
    (
        "experts bare, too short to divide",
        f"{META}.routed_experts",
        routed(ROWS[:5], "bare"),
        "80 bytes are not int32 rows",
    ),
    ("experts bare, not base64", f"{META}.routed_experts", "?" * 128, "not base64"),
    ("experts bare, negative", f"{META}.routed_experts", routed(-ROWS.astype(np.int32), "bare"), "below 0"),
    ("message gone", MESSAGE, Removed, "of message"),
]

GENERATE: list[tuple[str, str, Any, str]] = [
    ("names other tokens", f"{LOGPROBS}.content.0.token", "token_id:22", "other tokens"),
    ("names tokens by text", f"{LOGPROBS}.content.0.token", " the", "other tokens"),
    ("names no token", f"{LOGPROBS}.content.0.token", Removed, "other tokens"),
    ("token name null", f"{LOGPROBS}.content.0.token", None, "other tokens"),
    ("token name a number", f"{LOGPROBS}.content.0.token", 21, "got `int`"),
    ("token_id of another token", f"{LOGPROBS}.content.0.token_id", 22, "other tokens"),
    ("token_id a bool", f"{LOGPROBS}.content.0.token_id", True, "got `bool`"),
    ("token_id negative", f"{LOGPROBS}.content.0.token_id", -21, ">= 0"),
    ("token_id of some tokens only", f"{LOGPROBS}.content.0.token_id", 21, "other tokens"),
    ("no token ids", IDS, Removed, "no token_ids"),
]

GOOD = valid_response("vllm").body()
RAW: list[tuple[str, bytes, str]] = [
    ("empty body", b"", "malformed"),
    ("not JSON", b"upstream connect error", "malformed"),
    ("a list", b"[]", "Expected `object`"),
    ("null", b"null", "Expected `object`"),
    ("cut short", GOOD[:-1], "truncated"),
    ("something behind", GOOD + b"{}", "trailing"),
    ("not UTF-8", GOOD.replace("Grüße".encode(), b"Gr\xfc\xdfe"), "UTF-8"),
    ("a byte order mark", b"\xef\xbb\xbf" + GOOD, "malformed"),
    ("UTF-16", GOOD.decode().encode("utf-16"), "UTF-8"),
    ("NaN in a skipped field", GOOD.replace(b'"created":1762300000', b'"created":NaN'), "malformed"),
    ("Infinity in a skipped field", GOOD.replace(b'"created":1762300000', b'"created":Infinity'), "malformed"),
    ("a leading zero", GOOD.replace(b'"prompt_token_ids":[11', b'"prompt_token_ids":[011'), "malformed"),
    ("a trailing comma", GOOD.replace(b"13,14]", b"13,14,]"), "malformed"),
    ("a missing comma", GOOD.replace(b"13,14]", b"13 14]"), "malformed"),
    ("half a surrogate pair", GOOD.replace(b'"model":"policy"', b'"model":"\\ud83d"'), "malformed"),
    ("a raw newline in a string", GOOD.replace(b'"policy"', b'"pol\nicy"'), "malformed"),
    ("two choices", compact(changed(json.loads(GOOD), "choices", json.loads(GOOD)["choices"] * 2)), "2 choices"),
    ("ten thousand brackets", GOOD.replace(b'"model":"policy"', b'"model":' + b"[" * 10_000 + b"]" * 10_000), "nested"),
]

TABLE = [
    *[Malformed(name=name, dialect="vllm", body=body, message=message) for name, body, message in RAW],
    *[
        Malformed(
            name=name,
            dialect=dialect,
            body=json.dumps(changed(response, path, value), separators=(",", ":")).encode(),
            message=message,
        )
        for dialect, response, cases in [
            ("vllm", valid_response("vllm").as_dict(), VLLM),
            ("sglang", valid_response("sglang", "bare").as_dict(), SGLANG),
            ("generate", valid_response("generate").as_dict(), GENERATE),
        ]
        for name, path, value, message in cases
    ],
]

ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31 - 1, 2**31, 2**63, 2**64, 10**25, -0.0, 0.5, 1e-3, 1.1e-3, -1e39, 1e308, 14.0,
    "", "x", "AAAA", "token_id:1", "\ud83d\ude00", [], {}, [[]], [1], [0, -1], [[[1]]], [None], {"data": "AAAA"}, "5",
]  # fmt: skip
SNIPPETS = [
    b" ", b"\n", b",", b'"', b"\\", b"\\/", b"[", b"]", b"{", b"}", b":", b"null", b"true", b"NaN", b"-Infinity",
    b"1e999", b"-", b"0", b"00", b".5", b"=", b"==", b"A", b"\xff", b"\xc3\xa4", b"\x00", b"\\u00e4", b"\\ud800", b"//",
    b'"routed_experts":', b',"routed_experts":""', b',"prompt_token_ids":[', b'{"data":"', b',"prompt_token_ids":null',
]  # fmt: skip
SAFE = b"!#$%&'()*+/=AZaz09"
"""Bytes that need no escape in a JSON string."""


def mutated(response: dict[str, Any], rng: random.Random) -> bytes:
    """Up to two changes of structure; the body stays JSON."""
    response = copy.deepcopy(response)
    for _ in range(rng.choice([0, 1, 1, 2])):
        mutate(response, rng)
    return spelled(response, rng)


def mutate(response: dict[str, Any], rng: random.Random) -> None:
    where, key = rng.choice([*places(response)])
    match rng.randrange(8):
        case 0:
            del where[key]
        case 1 if isinstance(where, list):
            where.insert(key, copy.deepcopy(where[key]))
        case 2 if isinstance(where, dict):
            where[rng.choice(["routed_experts", "prompt_token_ids", "meta_info", "start", "x"])] = where[key]
        case 3 if isinstance(where[key], int):
            where[key] += rng.choice([-1, 1])
        case 4 if isinstance(where[key], str):
            at = rng.randrange(len(where[key]) + 1)
            where[key] = (
                where[key][:at] + rng.choice('A=!"\\é\n') * rng.randint(0, 4) + where[key][at + rng.randint(0, 4) :]
            )
        case _:
            where[key] = copy.deepcopy(rng.choice(ODD_VALUES))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key below a value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in [(value, key), *places(value[key])]]


def spelled(response: dict[str, Any], rng: random.Random) -> bytes:
    separators = rng.choice([(",", ":")] * 5 + [(", ", ": "), (",\n", ":")])
    response = shuffled(response, rng) if rng.random() < 0.4 else response
    return json.dumps(response, separators=separators, ensure_ascii=rng.random() < 0.3).encode(errors="surrogatepass")


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same value with the keys of its objects in another order."""
    if isinstance(value, list):
        return [shuffled(item, rng) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: shuffled(value[key], rng) for key in rng.sample(list(value), len(value))}


def scrambled(body: bytes, held: tuple[int, int], rng: random.Random) -> bytes:
    """A few bytes changed. In recorded rows (`held`), only by bytes that need no escape in a JSON string."""
    for _ in range(rng.choice([0, 1, 1, 2])):
        at = rng.randrange(len(body) + 1)
        if held[0] <= at < held[1]:
            body = body[:at] + bytes([rng.choice(SAFE)]) + body[at + 1 :]
        else:
            end = min(at + rng.choice([0, 0, 1, 2, 9]), held[0] if at < held[0] else len(body))
            new = rng.choice(SNIPPETS) if rng.random() < 0.7 else bytes([rng.randrange(256)])
            body = body[:at] + new + body[end:]
            moved = len(new) - (end - at) if at < held[0] else 0
            held = held[0] + moved, held[1] + moved
    return body
