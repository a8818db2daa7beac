"""One inference response -> one validated Turn; the routed experts are cut out of the bytes.

Speaks vLLM chat, SGLang chat and token-in/token-out `/inference/v1/generate`. What is known from earlier turns is
recognised, not decoded: a turn holds the new prompt ids and the new rows only. The quick way (cut, decode the rest by
type) and the full way (decode everything by type) give the same turn; what the quick way doubts, the full one decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.engines.cuts import MARK, MARKED, Cuts, OpenSample, Span, find_cuts
from penstock.engines.response_fields import (
    ABSENT,
    NO_META_INFO,
    Endpoint,
    Logprobs,
    compact_ids,
    completion_of,
    message_of,
    read_ids,
    read_part,
    read_reply,
    version_of,
)
from penstock.engines.routed_experts import (
    WIRE_OBJECT,
    RouteFormat,
    Routes,
    Wanted,
    read_compact_lists,
    read_lists,
    read_object,
    read_string,
)
from penstock.errors import Upstream
from penstock.turn import Fingerprint, Ids, Match, longest_in_ids


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the request said, as far as the answer need not repeat it."""

    endpoint: Endpoint = Endpoint.CHAT
    prompt_ids: Ids | None = None
    """Used where the answer has no `prompt_token_ids`."""
    routes_from: int = 0
    """The first row asked for (SGLang: `routed_experts_start_len`)."""
    max_seq_len: int | None = None
    """Tokens of prompt and completion together; what exceeds it is cut."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one response adds. Arrays are memory of their own: nothing of the body stays referenced."""

    extends: int | None
    """Which of the known sequences the prompt begins with, the longest; None starts a sample."""
    matches: int
    """How many of the known sequences the prompt begins with."""
    prefix_tokens: int
    """Length of that sequence: prompt ids that are not repeated here."""
    prompt_ids: Ids
    """The prompt from `prefix_tokens` on."""
    completion_ids: Ids
    completion_logprobs: Logprobs
    routes: Routes | None
    """Rows still wanted; None when none came."""
    sequence: Fingerprint
    """Of the whole prompt and completion: what a later prompt may begin with."""
    finish_reason: str | None
    version: int | None
    """The policy version, where the engine names one."""
    message: bytes | None
    """The assistant's message as JSON; None from token-in/token-out."""
    truncated: bool
    overlong_prompt: bool
    payload: Span | None
    """Where the routed experts lie in the body."""

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + len(self.prompt_ids)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + len(self.completion_ids)


NOTHING = OpenSample(sequence=Fingerprint(), rows_from=0)
CHAT, ANY_FORMAT = Asked(), RouteFormat()
WRONG_CUT = "what was cut out of the body is not what it was taken for"
"""Nobody reads it: the full way follows."""


def read_turn(
    body: bytes, *, known: Sequence[OpenSample] = (), asked: Asked = CHAT, route_format: RouteFormat = ANY_FORMAT
) -> Turn:
    """Validate a response and take what is new in it; `Upstream` says what an engine must not have said."""
    cuts = find_cuts(body, known, route_format)
    if cuts.any:
        try:
            return _read(body, cuts, known, asked, route_format)
        except Upstream:
            pass  # perhaps the cut was wrong and not the engine: the full way decides
    return _read(body, Cuts(), known, asked, route_format)


def without_routes(body: bytes, turn: Turn) -> bytes:
    """The body for the client: byte for byte the engine's, with `null` for the routed experts."""
    if turn.payload is None:
        return body
    start, end = turn.payload
    view = memoryview(body)
    return b"".join([view[:start], b"null", view[end:]])


def _read(body: bytes, cuts: Cuts, known: Sequence[OpenSample], asked: Asked, route_format: RouteFormat) -> Turn:
    try:
        return _turn(body, cuts, known, asked, route_format)
    except UnicodeDecodeError as error:
        raise Upstream(f"the engine's answer is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise Upstream("the engine's answer is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise Upstream(f"the engine's answer is malformed: {error}") from None


def _turn(body: bytes, cuts: Cuts, known: Sequence[OpenSample], asked: Asked, route_format: RouteFormat) -> Turn:
    said = _said(body, cuts, known, asked)
    before = NOTHING if said.match is None else known[said.match.index]
    prefix_tokens = before.sequence.tokens
    prompt_tokens = prefix_tokens + len(said.prompt_ids)
    tokens = prompt_tokens + len(said.completion_ids)
    limit = tokens if asked.max_seq_len is None else asked.max_seq_len
    prompt_ids = said.prompt_ids[: max(0, limit - prefix_tokens)]
    completion_ids = said.completion_ids[: max(0, limit - prompt_tokens)]
    wanted = Wanted(tokens=tokens, first=before.rows_from, until=min(tokens, limit), asked_from=asked.routes_from)
    return Turn(
        extends=said.match.index if said.match else None,
        matches=said.match.matches if said.match else 0,
        prefix_tokens=prefix_tokens,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completion_logprobs=said.logprobs[: len(completion_ids)],
        routes=_routes(body, cuts, said.payload, wanted, route_format) if said.payload else None,
        sequence=before.sequence.extended(prompt_ids, completion_ids),
        finish_reason=said.finish_reason,
        version=said.version,
        message=said.message,
        truncated=tokens > limit,
        overlong_prompt=prompt_tokens > limit,
        payload=said.payload.span if said.payload else None,
    )


@dataclass(frozen=True, kw_only=True)
class _Payload:
    json: bytes | memoryview
    """With the mark, where the base64 was cut out."""
    span: Span
    """In the body."""


@dataclass(frozen=True, kw_only=True)
class _Said:
    """A reply's parts, each valid by itself, without reference to the text that they were decoded from."""

    match: Match | None
    prompt_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs
    payload: _Payload | None
    finish_reason: str | None
    version: int | None
    message: bytes | None


def _said(body: bytes, cuts: Cuts, known: Sequence[OpenSample], asked: Asked) -> _Said:
    reply = read_reply(cuts.rest(body), asked.endpoint)
    choice = reply.only_choice()
    meta_info = choice.meta_info or NO_META_INFO
    match, prompt_ids = _prompt(
        choice.prompt_token_ids if reply.prompt_token_ids == ABSENT else reply.prompt_token_ids, cuts, known, asked
    )
    completion_ids, logprobs = completion_of(choice, meta_info)
    routed = meta_info.routed_experts if choice.routed_experts == ABSENT else choice.routed_experts
    return _Said(
        match=match,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=logprobs,
        payload=_payload(body, cuts, routed),
        finish_reason=choice.finish_reason,
        version=version_of(meta_info),
        message=message_of(choice) if asked.endpoint is Endpoint.CHAT else None,
    )


def _prompt(raw: msgspec.Raw, cuts: Cuts, known: Sequence[OpenSample], asked: Asked) -> tuple[Match | None, Ids]:
    """The known sequence that the prompt begins with, and the ids behind it."""
    if cuts.prompt is not None:
        before, mark, behind = bytes(raw).partition(MARKED)
        ids = compact_ids(b"[" + behind.removeprefix(b","))
        if before != b"[" or not mark or ids is None:  # in ids with spaces, a longer known sequence may hide
            raise Upstream(WRONG_CUT)
        return cuts.prompt.match, ids
    ids = asked.prompt_ids if raw == ABSENT else read_ids(bytes(raw), "prompt_token_ids")
    if ids is None:
        raise Upstream("the engine's answer has no prompt_token_ids, and the request named no ids")
    if not len(ids):
        raise Upstream("the engine's answer has an empty prompt_token_ids")
    ids = np.ascontiguousarray(ids, np.int32)
    match = longest_in_ids(ids, [sample.sequence for sample in known])
    return match, ids[known[match.index].sequence.tokens :] if match else ids


def _payload(body: bytes, cuts: Cuts, raw: msgspec.Raw) -> _Payload | None:
    if cuts.experts is not None:
        before, mark, behind = bytes(raw).partition(MARK)
        if not mark:
            raise Upstream(WRONG_CUT)
        if cuts.lists(body):
            return _Payload(json=bytes(raw), span=cuts.experts)
        return _Payload(json=bytes(raw), span=(cuts.experts[0] - len(before), cuts.experts[1] + len(behind)))
    if raw == ABSENT:
        return None
    if cuts.prompt is not None:
        raise Upstream(WRONG_CUT)  # what was cut moved the rest: decoded whole, the place can be told
    start = _address(raw) - _address(body)
    span = start, start + len(memoryview(raw))
    return _Payload(json=memoryview(body)[slice(*span)], span=span)


def _address(buffer: msgspec.Raw | bytes) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def _routes(body: bytes, cuts: Cuts, payload: _Payload, wanted: Wanted, route_format: RouteFormat) -> Routes | None:
    if payload.json[:1] == b"[":
        return read_lists(payload.json, wanted, route_format)
    if cuts.experts is not None and cuts.lists(body):
        if payload.json != MARKED:
            raise Upstream(WRONG_CUT)
        return read_compact_lists(memoryview(body)[slice(*cuts.experts)], wanted, route_format)
    wire = read_part(payload.json, WIRE_OBJECT, "routed_experts") if payload.json[:1] == b"{" else None
    quoted = memoryview(wire.data if wire else payload.json)
    if bytes(quoted[:1]) != b'"':
        raise Upstream("routed experts: neither base64 nor an object with base64 data nor lists")
    if cuts.experts is not None:
        if bytes(quoted) != MARKED:
            raise Upstream(WRONG_CUT)
        text = memoryview(body)[slice(*cuts.experts)]
    elif body.find(b"\\", *payload.span) < 0:
        text = quoted[1:-1]
    else:
        text = msgspec.json.decode(quoted, type=str).encode()
    return read_object(wire, text, wanted, route_format) if wire else read_string(text, wanted, route_format)
