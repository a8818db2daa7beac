"""The parts of a response body that need no parsing: routed experts, and prompt ids of an open
sample.

The dialect's keys locate them. A random mark replaces them before the rest is decoded by type. If
the decoder finds the mark in the expected field, the cut was right. Otherwise the caller decodes
the whole body.
"""

import ctypes
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from headpond.engines.responses.routed_experts import NPY_MAGIC_TEXT, base64_length, npy_header
from headpond.errors import Upstream
from headpond.turn import Body, Fingerprint, Ids, OpenSample, RouteFormat, Span

MARK = secrets.token_hex(16).encode()
MARKED = b'"%b"' % MARK
MARKED_LIST = msgspec.Raw(b"[%b]" % MARKED)
OBJECT_OPENING = b'{"data":"'

ID_CHARS = 11  # Longest id with its comma.
# Upper bound of the text behind the routed experts, prompt ids left out (usage and others): about
# 500 in practice.
OTHER_CHARS = 4096

_memmem = getattr(ctypes.CDLL(None), "memmem", None)
if _memmem:
    _memmem.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    _memmem.restype = ctypes.c_void_p


@dataclass(frozen=True, kw_only=True)
class Match:
    """The open sample that a prompt begins with."""

    index: int  # Position of the longest match in the given sequence; of equal ones, the first.
    matches: int  # Number of sequences that matched. More than one is recorded as ambiguous.


class PromptCut(NamedTuple):
    """A prompt that begins with the ids of an open sample."""

    match: Match
    span: Span  # All ids of the prompt, without brackets.
    new: Span  # The comma and the ids behind those of the sample; empty if there are none.


class Cuts(NamedTuple):
    experts: Span | None = None  # The base64 text without its quotes.
    prompt: PromptCut | None = None

    @property
    def any(self) -> bool:
        return self.experts is not None or self.prompt is not None

    def rest(self, body: Body) -> bytes:
        """The body with the mark in place of each cut."""
        marks = list[tuple[Span, bytes]]()
        if self.experts:
            marks.append((self.experts, MARK))
        if self.prompt:
            marks.append((self.prompt.span, MARKED))
        if not marks:
            return bytes(body)
        marks.sort()
        view, parts, done = memoryview(body), list[bytes | memoryview](), 0
        for (start, end), mark in marks:
            parts += view[done:start], mark
            done = end
        return b"".join((*parts, view[done:]))


def find_cuts(
    body: Body,
    open_samples: Sequence[OpenSample],
    route_format: RouteFormat,
    *,
    experts_key: bytes,
    prompt_key: bytes,
) -> Cuts:
    """Locate the parts to cut. The keys are the texts directly before the routed experts and the
    first prompt id.

    An empty key is not searched.
    """
    experts = _find_experts(body, experts_key, open_samples, route_format) if experts_key else None
    prompt = _find_prompt(body, prompt_key, open_samples, experts or (0, 0)) if open_samples and prompt_key else None
    return Cuts(experts=experts, prompt=prompt)


def longest_in_text(text: memoryview, sequences: Sequence[Fingerprint]) -> Match | None:
    """The longest sequence that a compact JSON list begins with. `text` starts after its bracket.

    Ids separated by spaces do not match.
    """
    return _longest(
        text,
        [
            (sequence.text_bytes, index, sequence.text_digest)
            for index, sequence in enumerate(sequences)
            if sequence.tokens and bytes(text[sequence.text_bytes : sequence.text_bytes + 1]) in (b",", b"]")
        ],
    )


def longest_in_ids(ids: Ids, sequences: Sequence[Fingerprint]) -> Match | None:
    """The longest sequence that `ids` begin with."""
    return _longest(
        ids.view(np.uint8).data,
        [
            (sequence.tokens * ids.itemsize, index, sequence.ids_digest)
            for index, sequence in enumerate(sequences)
            if sequence.tokens
        ],
    )


def _longest(data: memoryview, candidates: list[tuple[int, int, int]]) -> Match | None:
    """Candidates are (length in bytes, index, digest). `data` is hashed once, however many candidates there are."""
    hashed, done, matching = xxhash.xxh3_128(), 0, list[int]()
    if len(candidates) > 1:
        candidates.sort(key=lambda candidate: (candidate[0], -candidate[1]))
    for length, index, digest in candidates:
        if length > len(data):
            break
        hashed.update(data[done:length])
        done = length
        if hashed.intdigest() == digest:
            matching.append(index)
    return Match(index=matching[-1], matches=len(matching)) if matching else None


def _find_experts(body: Body, key: bytes, open_samples: Sequence[OpenSample], route_format: RouteFormat) -> Span | None:
    key_at = _first(body, key)
    if key_at < 0:
        return None
    start = key_at + len(key)
    if body.startswith(OBJECT_OPENING, start):
        start += len(OBJECT_OPENING)
    elif body.startswith(b'"', start):
        start += 1
    else:
        return None
    if body.startswith(NPY_MAGIC_TEXT, start):
        end = _npy_end(body, start, route_format)
    else:
        end = _base64_end(body, start, open_samples, route_format.row_bytes)
    return (start, end) if end >= 0 else None


def _first(body: Body, key: bytes) -> int:
    """`body.find(key)` in C, without the GIL. It takes 0.1 ms for 1 MB of logprobs instead of 0.3."""
    if not _memmem:
        return body.find(key)
    address = np.frombuffer(body, np.uint8).ctypes.data
    match_address = _memmem(address, len(body), key, len(key))
    return -1 if match_address is None else match_address - address


def _npy_end(body: Body, start: int, route_format: RouteFormat) -> int:
    try:
        header_bytes, rows, learned = npy_header(memoryview(body)[start:], route_format)
    except Upstream:
        return -1
    end = start + base64_length(header_bytes + rows * (learned.row_bytes or 0))
    return end if body.startswith(b'"', end) else -1


def _base64_end(body: Body, start: int, open_samples: Sequence[OpenSample], row_bytes: int | None) -> int:
    """Position of the closing quote.

    The search starts after the rows that the response must have if it extends an open sample.
    """
    if row_bytes:
        for sample in sorted(open_samples, key=lambda sample: sample.rows_from, reverse=True):
            rows = _least_rows(sample, len(body) - start, row_bytes * 4 / 3)
            end = body.find(b'"', start + rows * row_bytes // 3 * 4)
            length = end - start
            if length >= 0 and length == base64_length(length // 4 * 3 // row_bytes * row_bytes):
                return end
    return body.find(b'"', start)


def _least_rows(sample: OpenSample, chars: int, row_chars: float) -> int:
    """The fewest rows that the last `chars` characters of a body can begin with if it extends `sample`."""
    other_chars = sample.sequence.text_bytes + OTHER_CHARS - ID_CHARS * sample.sequence.tokens
    return max(sample.rows_from, int((chars - other_chars) / (row_chars + ID_CHARS)))


def _find_prompt(body: Body, key: bytes, open_samples: Sequence[OpenSample], experts: Span) -> PromptCut | None:
    """Locate the prompt: most engines print it after the choices, some before."""
    key_at = body.find(key, experts[1])
    if key_at < 0:
        key_at = body.find(key, 0, experts[0])
    if key_at < 0:
        return None
    first = key_at + len(key)
    match = longest_in_text(memoryview(body)[first:], [sample.sequence for sample in open_samples])
    if match is None:
        return None
    new_from = first + open_samples[match.index].sequence.text_bytes
    end = body.find(b"]", new_from)
    return PromptCut(match=match, span=(first, end), new=(new_from, end)) if end >= 0 else None
