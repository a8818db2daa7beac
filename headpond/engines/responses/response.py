"""One response body -> one validated `Turn`.

Only new parts are decoded: prompt ids and routed rows that an open sample holds are skipped. The
fast path cuts them and the routed experts out of the bytes and decodes the rest by type. The full
path decodes everything by type. Both give the same turn. The full path reads again whatever the
fast path rejects.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from types import NoneType
from typing import NamedTuple

import msgspec
import numpy as np
import orjson

from headpond.config.engine import AbsentRoutes
from headpond.engines.dialects.base import (
    ABSENT,
    LOGPROB_ROUNDING,
    NO_IDS,
    Dialect,
    ResponseFields,
    TokenId,
    listed_ids,
    read_ids,
    read_part,
)
from headpond.engines.responses.cuts import MARK, MARKED, MARKED_LIST, Cuts, Match, find_cuts, longest_in_ids
from headpond.engines.responses.routed_experts import WIRE_OBJECT, Wanted, read_object, read_string
from headpond.errors import Aborted, StageError, Upstream
from headpond.fields import Array
from headpond.turn import (
    ANY_FORMAT,
    MAX_NESTING,
    Body,
    Fingerprint,
    Ids,
    Logprobs,
    Mask,
    OpenSample,
    RouteFormat,
    Routes,
    SamplingMask,
    Span,
    Turn,
    VersionSpan,
    is_nested_too_deeply,
)


@dataclass(frozen=True, kw_only=True)
class RequestInfo:
    """The parts of a request that `read_turn` needs."""

    dialect: Dialect
    prompt_ids: Ids | None = None  # Ids of the prompt, used if the response has none.
    # First routed row that was requested (SGLang: `routed_experts_start_len`).
    routes_from: int = 0
    # Limit of prompt and completion together. Tokens beyond it are cut.
    max_seq_len: int | None = None
    fields: tuple[str, ...] = ()  # Fields for the trainer to look for in the response.
    # Whether the renderer makes the message from the completion's tokens. The engine's
    # message is then not used.
    renders: bool = False
    # Whether the caller continues an aborted completion. Otherwise one raises `Aborted`.
    continues: Callable[[], bool] = lambda: False


MAX_LOGPROB = np.float32(LOGPROB_ROUNDING)
# vLLM's value for a logprob that is missing, NaN or minus infinity. No model gives a token so
# little.
NO_LOGPROB = np.float32(-9999.0)
KEEP = (
    'pause the engine so that it keeps what it generates (vLLM: /pause?mode=keep, SGLang: /pause_generation with mode "'
    'in_place"), or lower the number of weight updates'
)
NEW_SAMPLE = OpenSample(sequence=Fingerprint(), rows_from=0)
ROUTES_FROM = "vLLM (0.22.0 or newer) or SGLang (0.5.19 or newer) with --enable-return-routed-experts"
NESTED_LISTS = f"routed experts: nested lists are not read; start {ROUTES_FROM}, which send base64"
# Internal error text: the full path follows.
WRONG_CUT = "a cut does not match the field it was taken for"
# Errors that a dialect may raise when it decodes a malformed response.
MALFORMED = (msgspec.DecodeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError)
OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
MASKS = msgspec.json.Decoder(list[list[TokenId]])
VALUES = msgspec.json.Decoder(int | float | list[int | float])
RAW = "msgspec.Raw, the JSON text of the part"
PARTS = (
    ("completion_ids", np.ndarray, "a numpy array of int32"),
    ("completion_logprobs", np.ndarray, "a numpy array of float32"),
    ("prompt_ids", msgspec.Raw, RAW),
    ("routed_experts", msgspec.Raw, RAW),
    ("sampling_mask", msgspec.Raw, RAW),
    ("message", (bytes, NoneType), "the message as JSON in bytes, or None"),
    ("finish_reason", (str, NoneType), "a str or None"),
    ("version", (int, NoneType), "an int or None"),
    ("version_spans", tuple, "a tuple of VersionSpan"),
    ("final", bool, "True or False"),
)  # The parts of `ResponseFields`: name, type, advice. A custom dialect may get them wrong.
# Types of all parts that were checked one by one: a dialect has one or two such tuples.
RIGHT_KINDS = set[tuple[type, ...]]()
_parts = attrgetter(*(name for name, _, _ in PARTS))


def read_turn(
    body: Body,
    *,
    request: RequestInfo,
    open_samples: Sequence[OpenSample] = (),
    route_format: RouteFormat = ANY_FORMAT,
) -> Turn:
    """Validate a response and return its new parts. `Upstream` if it is malformed, StageError if
    the dialect is wrong."""
    dialect = request.dialect
    cuts = find_cuts(
        body,
        open_samples,
        route_format,
        experts_key=dialect.experts_key,
        prompt_key=dialect.prompt_key,
    )
    if cuts.any:
        try:
            return _read(body, cuts, open_samples, request, route_format)
        except Aborted:
            raise
        except (Upstream, StageError):
            pass  # the cut may be wrong rather than the response: the full path decides
    return _read(bytes(body), Cuts(), open_samples, request, route_format)  # decoders refer to what they decode


def _read(
    body: Body, cuts: Cuts, open_samples: Sequence[OpenSample], request: RequestInfo, route_format: RouteFormat
) -> Turn:
    try:
        return _turn(body, cuts, open_samples, request, route_format)
    except UnicodeDecodeError as error:
        raise Upstream(f"the engine's response is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise Upstream("the engine's response is nested too deeply") from None
    except (msgspec.DecodeError, json.JSONDecodeError) as error:
        raise Upstream(f"the engine's response is malformed: {error}") from None


def _turn(
    body: Body, cuts: Cuts, open_samples: Sequence[OpenSample], request: RequestInfo, route_format: RouteFormat
) -> Turn:
    uncut = cuts.rest(body)
    response = _response(uncut, request)
    match, new_ids, new_text = _prompt(body, response.prompt_ids, cuts, open_samples, request)
    payload = _payload(body, response.routed_experts, cuts)
    sample = NEW_SAMPLE if match is None else open_samples[match.index]
    prefix_tokens = sample.sequence.tokens
    prompt_tokens = prefix_tokens + len(new_ids)
    sampled_ids, logprobs, mask = _completion(response, request.dialect)
    tokens = prompt_tokens + len(sampled_ids)
    limit = tokens if request.max_seq_len is None else request.max_seq_len
    prompt_ids = new_ids[: max(0, limit - prefix_tokens)]
    completion_ids = sampled_ids[: max(0, limit - prompt_tokens)]
    fields = _trainer_fields(uncut, request.fields, tokens=len(sampled_ids))
    wanted_rows = Wanted(
        tokens=tokens, first=sample.rows_from, until=min(tokens, limit), requested_from=request.routes_from
    )
    routes = _routes(body, cuts, payload, wanted_rows, route_format) if payload else None
    absent = routes is None and response.final and _expects_routes(wanted_rows, request.dialect)
    masks_absent = request.dialect.settings.absent_routes is AbsentRoutes.MASK
    mask = None if mask is None else mask[: len(completion_ids)]
    return Turn(
        extends=match.index if match else None,
        matches=match.matches if match else 0,
        prefix_tokens=prefix_tokens,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completion_logprobs=logprobs[: len(completion_ids)],
        routes=routes,
        sequence=sample.sequence.extended(
            prompt_ids, completion_ids, text=new_text if len(prompt_ids) == len(new_ids) else None
        ),
        finish_reason=response.finish_reason,
        version=response.version,
        version_spans=_spans(response.version_spans, len(sampled_ids), len(completion_ids)),
        message=None if request.renders else response.message,
        truncated=tokens > limit,
        overlong_prompt=prompt_tokens > limit,
        routes_span=payload.span if payload else None,
        aborted=not response.final,
        completion_mask=np.zeros(len(completion_ids), np.uint8) if absent and masks_absent else mask,
        unknown_logprobs=0 if mask is None else int(np.count_nonzero(mask == 0)),
        routes_absent=absent,
        sampling_mask=_sampling_mask(response, request, sampled_ids, len(completion_ids)),
        fields={name: values[: len(completion_ids)] if values.ndim else values for name, values in fields.items()},
    )


def _expects_routes(wanted_rows: Wanted, dialect: Dialect) -> bool:
    """Whether the response must have new rows. It has none: `Upstream` if `engine.absent_routes`
    makes that an error."""
    settings = dialect.settings
    if not settings.routed_experts or min(wanted_rows.tokens - 1, wanted_rows.until) <= wanted_rows.first:
        return False
    if settings.absent_routes is AbsentRoutes.ERROR:
        raise Upstream(
            f"the engine sent no routed experts, and engine.routed_experts is true: start {ROUTES_FROM}, or set "
            "engine.absent_routes"
        )
    return True


def _sampling_mask(response: ResponseFields, request: RequestInfo, ids: Ids, kept_tokens: int) -> SamplingMask | None:
    """The tokens that each completion token was drawn from (top-k, top-p, min-p).

    `Upstream` unless every token has a set that contains it.
    """
    raw = response.sampling_mask
    if not request.dialect.settings.sampling_masks:
        return None
    if raw == ABSENT and not len(ids):
        return SamplingMask.empty()
    if raw == ABSENT:
        raise Upstream(
            "the engine sent no sampling mask, and engine.sampling_masks is true: start vLLM with "
            "--return-sampling-mask, upgrade SGLang, or remove the setting"
        )
    sets = read_part(raw, MASKS, "the sampling mask")
    if len(sets) != len(ids):
        raise Upstream(f"the engine's response has {len(sets)} sampling masks for {len(ids)} tokens")
    lengths = np.fromiter(map(len, sets), np.int32, len(sets))
    drawn_from = np.fromiter(chain.from_iterable(sets), np.int32, int(lengths.sum()))
    sets_with_token = np.repeat(np.arange(len(sets)), lengths)[drawn_from == np.repeat(ids, lengths)]
    if len(np.unique(sets_with_token)) != len(sets):
        raise Upstream("the engine's response has a sampling mask without the token that was sampled")
    return SamplingMask(ids=drawn_from, lengths=lengths).first(kept_tokens)


def _response(text: bytes, request: RequestInfo) -> ResponseFields:
    dialect = request.dialect
    if not text.isascii():
        text.decode()  # msgspec does not check the encoding of values that it skips
    with dialect.boundary("read", *MALFORMED):
        response = dialect.read(text)
    if wrong := _wrong_type(response):  # the response is not to blame, and another one would not help
        raise StageError(f"{type(dialect).__name__}.read returned {wrong}")
    if not response.final and not request.continues():
        aborted = Aborted(f"the engine aborted the completion (finish reason {response.finish_reason!r}): {KEEP}")
        aborted.sampled_tokens = len(response.completion_ids)
        raise aborted
    message = response.message or b""
    if is_nested_too_deeply(message, lambda: orjson.loads(message)):
        raise Upstream(f"the engine's message is nested deeper than {MAX_NESTING} levels")
    return response


def _wrong_type(response: object) -> str | None:
    if not isinstance(response, ResponseFields):
        return f"a {type(response).__name__}: return headpond.engines.dialects.ResponseFields"
    kinds = tuple(map(type, _parts(response)))
    if kinds not in RIGHT_KINDS:
        for (name, kind, advice), value in zip(PARTS, _parts(response), strict=True):
            if not isinstance(value, kind):
                return f"{name} of type {type(value).__name__}: return {advice}"
        RIGHT_KINDS.add(kinds)
    ids, logprobs = response.completion_ids, response.completion_logprobs
    if ids.size and ids.dtype.kind not in "iu":
        return f"completion_ids of dtype {ids.dtype}: return int32"
    if logprobs.size and logprobs.dtype.kind not in "fiu":
        return f"completion_logprobs of dtype {logprobs.dtype}: return float32"
    return None


def _completion(response: ResponseFields, dialect: Dialect) -> tuple[Ids, Logprobs, Mask | None]:
    """Ids and logprobs, checked, and a mask of the tokens that have a logprob; None if all have.

    The others get logprob 0, like context.
    """
    ids, logprobs = _checked_completion(response, dialect)
    if not len(logprobs) or logprobs.min() > NO_LOGPROB:
        return ids, logprobs, None
    has_logprob = logprobs > NO_LOGPROB
    return ids, np.where(has_logprob, logprobs, np.float32(0)), has_logprob.astype(np.uint8)


def _checked_completion(response: ResponseFields, dialect: Dialect) -> tuple[Ids, Logprobs]:
    ids = np.ascontiguousarray(response.completion_ids, np.int32)
    logprobs = np.ascontiguousarray(response.completion_logprobs, np.float32)
    if ids.shape != logprobs.shape or ids.ndim != 1:
        raise Upstream(f"the engine's response has ids of shape {ids.shape} but logprobs of shape {logprobs.shape}")
    if dialect.checks_values or not len(ids):
        return ids, logprobs
    if ids is not response.completion_ids and not np.array_equal(ids, response.completion_ids):
        raise Upstream("the engine's response has ids above 2147483647")
    if ids.min() < 0 or not np.isfinite(logprobs.min()) or logprobs.max() > MAX_LOGPROB:
        raise Upstream("the engine's response has negative ids, or logprobs that are above 0 or not finite")
    return ids, logprobs


def _trainer_fields(text: bytes, names: Sequence[str], *, tokens: int) -> dict[str, Array]:
    """The trainer's fields in a response: on its choice, in `meta_info`, or outside of both.

    Each is one number, or one for each of its `tokens` completion tokens.
    """
    if not names or not any(b'"%b"' % name.encode() in text for name in names):
        return {}
    values = OBJECT.decode(text)
    if "choices" in values:
        values |= read_part(values["choices"], CHOICES, "choices")[0]
    if values.get("meta_info", ABSENT) != ABSENT:
        values = read_part(values["meta_info"], OBJECT, "meta_info") | values
    fields = {
        name: np.array(read_part(values[name], VALUES, name)) for name in names if values.get(name, ABSENT) != ABSENT
    }
    for name, array in fields.items():
        if array.shape not in ((), (tokens,)):
            raise Upstream(f"the engine's response has {array.size} values of {name} for {tokens} completion tokens")
    return fields


def _spans(spans: tuple[VersionSpan, ...], tokens: int, kept_tokens: int) -> tuple[VersionSpan, ...]:
    """The spans of the first `kept_tokens` tokens, checked to cover all of them once, in order."""
    if not spans:
        return ()
    bounds = [0, *(span.end for span in spans)]
    if [*(span.start for span in spans), tokens] != bounds or bounds != sorted(bounds):
        raise Upstream(f"the engine's weight versions do not cover the {tokens} tokens of its response, in order")
    return tuple(replace(span, end=min(span.end, kept_tokens)) for span in spans if span.start < kept_tokens)


class _NewIds(NamedTuple):
    """The open sample that a prompt begins with, and the ids after it."""

    match: Match | None
    ids: Ids
    text: bytes | None = None  # `ids_text`, if it is known.


def _prompt(
    body: Body, raw: msgspec.Raw, cuts: Cuts, open_samples: Sequence[OpenSample], request: RequestInfo
) -> _NewIds:
    if cuts.prompt is not None:
        text = bytes(memoryview(body)[slice(*cuts.prompt.new)])
        ids = listed_ids(text := text[1:]) if text else NO_IDS
        if raw != MARKED_LIST or ids is None:  # ids with spaces may hide a longer match
            raise Upstream(WRONG_CUT)
        _check_sent(ids, open_samples[cuts.prompt.match.index].sequence, request)
        return _NewIds(match=cuts.prompt.match, ids=ids, text=text)
    ids = request.prompt_ids if raw == ABSENT else read_ids(bytes(raw), "prompt_token_ids")
    if ids is None:
        raise Upstream("the engine's response has no prompt_token_ids, and the request had no ids")
    if not len(ids):
        raise Upstream("the engine's response has an empty prompt_token_ids")
    ids = np.ascontiguousarray(ids, np.int32)
    if raw != ABSENT:
        _check_sent(ids, NEW_SAMPLE.sequence, request)
    match = longest_in_ids(ids, [sample.sequence for sample in open_samples])
    return _NewIds(match=match, ids=ids[open_samples[match.index].sequence.tokens :] if match else ids)


def _check_sent(ids: Ids, prefix: Fingerprint, request: RequestInfo) -> None:
    """`Upstream` if the prompt, `ids` behind `prefix`, is not the one that was sent.

    The response then answers another request.
    """
    sent = request.prompt_ids
    if sent is None:
        return
    same = len(sent) == prefix.tokens + len(ids) and np.array_equal(sent[prefix.tokens :], ids)
    if not same or Fingerprint.of(sent[: prefix.tokens]).ids_digest != prefix.ids_digest:
        raise Upstream("the engine's response has other prompt_token_ids than its request: it answers another one")


class _Payload(NamedTuple):
    """The value of `routed_experts`."""

    json: bytes | memoryview  # The value as JSON, with the mark in place of a cut.
    # Position of the value in the body; None if the dialect made the value itself.
    span: Span | None


def _payload(body: Body, raw: msgspec.Raw, cuts: Cuts) -> _Payload | None:
    if cuts.experts is not None:
        start, end = cuts.experts
        prefix, mark, suffix = bytes(raw).partition(MARK)
        if not mark:
            raise Upstream(WRONG_CUT)
        return _Payload(json=bytes(raw), span=(start - len(prefix), end + len(suffix)))
    if raw == ABSENT:
        return None
    if cuts.any:
        raise Upstream(WRONG_CUT)  # the cut moved the rest: only the full path can locate the payload
    start = _address(raw) - _address(body)
    span = start, start + len(memoryview(raw))
    if start < 0 or span[1] > len(body):
        return _Payload(json=bytes(raw), span=None)
    return _Payload(json=memoryview(body)[slice(*span)], span=span)


def _address(buffer: msgspec.Raw | Body) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def _routes(body: Body, cuts: Cuts, payload: _Payload, wanted_rows: Wanted, route_format: RouteFormat) -> Routes | None:
    if payload.json[:1] == b"[":
        raise Upstream(NESTED_LISTS)
    wire = read_part(payload.json, WIRE_OBJECT, "routed_experts") if payload.json[:1] == b"{" else None
    quoted = memoryview(wire.data if wire else payload.json)
    if bytes(quoted[:1]) != b'"':
        raise Upstream("routed experts: neither base64 nor an object with base64 data")
    if cuts.experts is not None:
        if bytes(quoted) != MARKED:
            raise Upstream(WRONG_CUT)
        text = memoryview(body)[slice(*cuts.experts)]
    elif payload.span and body.find(b"\\", *payload.span) < 0:
        text = quoted[1:-1]
    else:
        text = msgspec.json.decode(quoted, type=str).encode()
    return read_object(wire, text, wanted_rows, route_format) if wire else read_string(text, wanted_rows, route_format)
