"""Random mutations of bodies: values, keys and spelling of the structure, and bytes."""

import copy
import json
import random
from typing import Any

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
