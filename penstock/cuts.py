"""What need not be parsed of a response body: the routed experts' base64, and prompt ids that are known.

Both are found without looking at what is known, and replaced by a mark that no engine can guess: where a typed decoding
of the rest meets the mark at its place, the right thing was cut; where not, the caller decodes the whole.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.errors import Upstream
from penstock.fingerprints import Fingerprint, Match, longest_in_text
from penstock.routed_experts import NPY_MAGIC_TEXT, RouteFormat, base64_length, npy_header

MARK = secrets.token_hex(16).encode()
MARKED = b'"%b"' % MARK
EXPERTS_KEY = b'"routed_experts":'
PROMPT_KEY = b'"prompt_token_ids":['

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Cuts:
    experts: Span | None = None
    """The base64 text, without its quotes."""
    prompt: Span | None = None
    """The known ids at the start of the prompt, without the bracket before and the comma behind."""
    match: Match | None = None
    """The known sequence that those ids are."""

    def rest(self, body: bytes) -> bytes:
        """The body with the mark in place of what was cut."""
        view, parts, done = memoryview(body), list[bytes | memoryview](), 0
        marks = [(span, mark) for span, mark in [(self.experts, MARK), (self.prompt, MARKED)] if span]
        for (start, end), mark in sorted(marks):
            parts += [view[done:start], mark]
            done = end
        return b"".join([*parts, view[done:]]) if parts else body


def find_cuts(body: bytes, known: Sequence[Fingerprint], known_rows: Iterable[int], route_format: RouteFormat) -> Cuts:
    experts = _find_experts(body, known_rows, route_format)
    at = _find_prompt(body, experts) if known else None
    if at is None:
        return Cuts(experts=experts)
    match = longest_in_text(memoryview(body)[slice(*at)], known)
    if match is None:
        return Cuts(experts=experts)
    return Cuts(experts=experts, prompt=(at[0], at[0] + known[match.index].text_bytes), match=match)


def _is_key(body: bytes, at: int) -> bool:
    """A quote behind a comma or a brace cannot be an escaped one inside a string."""
    return at > 0 and body[at - 1] in b",{"


def _find_experts(body: bytes, known_rows: Iterable[int], route_format: RouteFormat) -> Span | None:
    key = body.find(EXPERTS_KEY)
    if not _is_key(body, key):
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


def _find_prompt(body: bytes, experts: Span | None) -> Span | None:
    """The ids of the prompt, without brackets. Engines print them behind the choices or before."""
    start, end = experts or (0, 0)
    key = body.find(PROMPT_KEY, end)
    if key < 0:
        key = body.find(PROMPT_KEY, 0, start)
    if not _is_key(body, key):
        return None
    first = key + len(PROMPT_KEY)
    last = body.find(b"]", first)
    return (first, last) if last >= 0 else None
