"""What need not be parsed of a response body: the routed experts' base64, and prompt ids that are known.

Both are found without looking at what is known, and replaced by a mark that no engine can guess: where a typed decoding
of the rest meets the mark at its place, the right thing was cut; where not, the caller decodes the whole.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.errors import Upstream
from penstock.fingerprints import Fingerprint, Ids, Match, ids_of, longest_in_text
from penstock.routed_experts import NPY_MAGIC_TEXT, RouteFormat, base64_length, npy_header

MARK = secrets.token_hex(16).encode()
MARKED = b'"%b"' % MARK
EXPERTS_KEY = b'"routed_experts":'
PROMPT_KEY = b'"prompt_token_ids":['

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class KnownPrompt:
    """A prompt that begins with a known sequence."""

    match: Match
    ids: Ids
    """Behind that sequence."""
    span: Span
    """The whole list, with its brackets."""


@dataclass(frozen=True, kw_only=True)
class Cuts:
    experts: Span | None = None
    """The base64 text, without its quotes."""
    prompt: KnownPrompt | None = None

    @property
    def any(self) -> bool:
        return self.experts is not None or self.prompt is not None

    def rest(self, body: bytes) -> bytes:
        """The body with the mark in place of what was cut."""
        view, parts, done = memoryview(body), list[bytes | memoryview](), 0
        marks = [(self.experts, MARK)] if self.experts else []
        marks += [(self.prompt.span, MARKED)] if self.prompt else []
        for (start, end), mark in sorted(marks):
            parts += [view[done:start], mark]
            done = end
        return b"".join([*parts, view[done:]]) if parts else body


def find_cuts(body: bytes, known: Sequence[Fingerprint], known_rows: Iterable[int], route_format: RouteFormat) -> Cuts:
    experts = _find_experts(body, known_rows, route_format)
    return Cuts(experts=experts, prompt=_find_prompt(body, known, experts or (0, 0)) if known else None)


def _find_experts(body: bytes, known_rows: Iterable[int], route_format: RouteFormat) -> Span | None:
    key = body.find(EXPERTS_KEY)
    if key < 0:
        return None
    start = key + len(EXPERTS_KEY)
    opening = next((text for text in (b'"', b'{"data":"') if body.startswith(text, start)), None)
    if opening is None:
        return None
    start += len(opening)
    if body.startswith(NPY_MAGIC_TEXT, start):
        end = _npy_end(body, start, route_format)
    else:
        end = _base64_end(body, start, known_rows, route_format.row_bytes)
    return (start, end) if end >= 0 else None


def _npy_end(body: bytes, start: int, route_format: RouteFormat) -> int:
    try:
        header_bytes, rows, learned = npy_header(memoryview(body)[start:], route_format)
    except Upstream:
        return -1
    end = start + base64_length(header_bytes + rows * (learned.row_bytes or 0))
    return end if body.startswith(b'"', end) else -1


def _base64_end(body: bytes, start: int, known_rows: Iterable[int], row_bytes: int | None) -> int:
    """The closing quote, searched for behind the known rows of the longest sequence that this can be."""
    if row_bytes:
        for rows in sorted(known_rows, reverse=True):
            end = body.find(b'"', start + rows * row_bytes // 3 * 4)
            length = end - start
            if length >= 0 and length == base64_length(length // 4 * 3 // row_bytes * row_bytes):
                return end
    return body.find(b'"', start)


def _find_prompt(body: bytes, known: Sequence[Fingerprint], experts: Span) -> KnownPrompt | None:
    """Engines print the prompt behind the choices, some before."""
    key = body.find(PROMPT_KEY, experts[1])
    if key < 0:
        key = body.find(PROMPT_KEY, 0, experts[0])
    if key < 0:
        return None
    first = key + len(PROMPT_KEY)
    match = longest_in_text(memoryview(body)[first:], known)
    if match is None:
        return None
    behind = first + known[match.index].text_bytes
    end = body.find(b"]", behind)
    ids = ids_of(body[behind:end].removeprefix(b","))
    if end < 0 or ids is None:  # in text that is not plain ids, a longer sequence may hide
        return None
    return KnownPrompt(match=match, ids=ids, span=(first - 1, end + 1))
