"""What need not be parsed of a response body: the routed experts, and prompt ids that are known.

Both are found without looking at what is known, and replaced by a mark that no engine can guess: where a typed decoding
of the rest meets the mark at its place, the right thing was cut; where not, the caller decodes the whole.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engines.routed_experts import NPY_MAGIC_TEXT, RouteFormat, base64_length, npy_header
from penstock.errors import Upstream
from penstock.turn import Fingerprint, Match, longest_in_text

MARK = secrets.token_hex(16).encode()
MARKED = b'"%b"' % MARK
EXPERTS_KEY = b'"routed_experts":'
OBJECT_OPENING = b'{"data":"'
LISTS_OPENING, LISTS_CLOSING = b"[[[", b"]]]"
PROMPT_KEY = b'"prompt_token_ids":['

ID_CHARS = 11
"""An id and its comma, at most."""
OTHER_CHARS = 4096
"""What follows the routed experts beside the prompt's ids: usage and the like, some 500 characters in practice."""

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class OpenSample:
    """An open sample that a response may extend."""

    sequence: Fingerprint
    rows_from: int
    """The first token position whose routed experts are still wanted: normally `sequence.tokens - 1`."""

    def least_rows(self, chars: int, row_chars: float) -> int:
        """The fewest rows that the last `chars` characters of a body can begin with, if it extends this sample."""
        others = self.sequence.text_bytes + OTHER_CHARS - ID_CHARS * self.sequence.tokens
        return max(self.rows_from, int((chars - others) / (row_chars + ID_CHARS)))


@dataclass(frozen=True, kw_only=True)
class KnownPrompt:
    """A prompt that begins with a known sequence."""

    match: Match
    span: Span
    """That sequence's ids, without the bracket before and the comma behind."""


@dataclass(frozen=True, kw_only=True)
class Cuts:
    experts: Span | None = None
    """The base64 text, without its quotes; or nested lists."""
    prompt: KnownPrompt | None = None

    @property
    def any(self) -> bool:
        return self.experts is not None or self.prompt is not None

    def lists(self, body: bytes) -> bool:
        """Whether it is nested lists that were cut, brackets and all, and no base64."""
        return self.experts is not None and body.startswith(LISTS_OPENING, self.experts[0])

    def rest(self, body: bytes) -> bytes:
        """The body with the mark in place of what was cut."""
        view, parts, done = memoryview(body), list[bytes | memoryview](), 0
        marks = [(self.experts, MARKED if self.lists(body) else MARK)] if self.experts else []
        marks += [(self.prompt.span, MARKED)] if self.prompt else []
        for (start, end), mark in sorted(marks):
            parts += [view[done:start], mark]
            done = end
        return b"".join([*parts, view[done:]]) if parts else body


def find_cuts(body: bytes, known: Sequence[OpenSample], route_format: RouteFormat) -> Cuts:
    experts = _find_experts(body, known, route_format)
    return Cuts(experts=experts, prompt=_find_prompt(body, known, experts or (0, 0)) if known else None)


def _find_experts(body: bytes, known: Sequence[OpenSample], route_format: RouteFormat) -> Span | None:
    key = body.find(EXPERTS_KEY)
    if key < 0:
        return None
    start = key + len(EXPERTS_KEY)
    if body.startswith(LISTS_OPENING, start):
        end = body.find(LISTS_CLOSING, start)
        return (start, end + len(LISTS_CLOSING)) if end >= 0 else None
    if body.startswith(OBJECT_OPENING, start):
        start += len(OBJECT_OPENING)
    elif body.startswith(b'"', start):
        start += 1
    else:
        return None
    if body.startswith(NPY_MAGIC_TEXT, start):
        end = _npy_end(body, start, route_format)
    else:
        end = _base64_end(body, start, known, route_format.row_bytes)
    return (start, end) if end >= 0 else None


def _npy_end(body: bytes, start: int, route_format: RouteFormat) -> int:
    try:
        header_bytes, rows, learned = npy_header(memoryview(body)[start:], route_format)
    except Upstream:
        return -1
    end = start + base64_length(header_bytes + rows * (learned.row_bytes or 0))
    return end if body.startswith(b'"', end) else -1


def _base64_end(body: bytes, start: int, known: Sequence[OpenSample], row_bytes: int | None) -> int:
    """The closing quote, searched for behind the rows that the answer must have if it extends a known sample."""
    if row_bytes:
        for sample in sorted(known, key=lambda sample: sample.rows_from, reverse=True):
            rows = sample.least_rows(len(body) - start, row_bytes * 4 / 3)
            end = body.find(b'"', start + rows * row_bytes // 3 * 4)
            length = end - start
            if length >= 0 and length == base64_length(length // 4 * 3 // row_bytes * row_bytes):
                return end
    return body.find(b'"', start)


def _find_prompt(body: bytes, known: Sequence[OpenSample], experts: Span) -> KnownPrompt | None:
    """Engines print the prompt behind the choices, some before."""
    key = body.find(PROMPT_KEY, experts[1])
    if key < 0:
        key = body.find(PROMPT_KEY, 0, experts[0])
    if key < 0:
        return None
    first = key + len(PROMPT_KEY)
    match = longest_in_text(memoryview(body)[first:], [sample.sequence for sample in known])
    if match is None:
        return None
    return KnownPrompt(match=match, span=(first, first + known[match.index].sequence.text_bytes))
