"""The recorded conversation of a rollout, and its tokens with their texts, logprobs and masks."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from headpond.batches import Manifest, read_manifest
from headpond.batches.annotations import read_annotations
from headpond.batches.manifest import SAMPLE, Array
from headpond.errors import BlobError, ConfigError
from headpond.renderers.bytes_chatml import MESSAGE_END, MESSAGE_START
from headpond.spans import TimedSpan
from headpond.store import BlobRef, Store, tensors
from headpond.store.columns import Columns, read_columns
from headpond.store.experts import Experts

TokenTexts = Callable[[Sequence[int]], list[str]]
BYTES_CHATML = "bytes-chatml"
SPECIAL = {MESSAGE_START: "<|im_start|>", MESSAGE_END: "<|im_end|>"}


# Tokens of one answer: about 100 kB.
TOKENS_MOST = 4096
# Characters of a message in a conversation. Pages read the rest in parts of PART_MOST.
TEXT_MOST = 20_000
PART_MOST = 200_000
MESSAGES_MOST = 400
SPANS_SHOWN = 1_000
DIGITS = 5


def token_texts(tokenizer: str | None, settings: dict[str, Any]) -> TokenTexts | None:
    """`tokenizer`: a directory or "bytes-chatml"; without it, what the run's settings name and this host has."""
    if tokenizer is None and settings.get("policy.renderer.backend") == BYTES_CHATML:
        tokenizer = BYTES_CHATML
    if tokenizer is None:
        return None
    return _byte_texts if tokenizer == BYTES_CHATML else _of_directory(tokenizer)


def _byte_texts(ids: Sequence[int]) -> list[str]:
    """A byte of a longer character is shown as its number."""
    return [SPECIAL.get(id, chr(id) if 0 <= id < 128 else f"\\x{id:02x}" if id < 256 else f"<{id}>") for id in ids]


@lru_cache(maxsize=4)
def _of_directory(directory: str) -> TokenTexts:
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{directory} has no tokenizer.json: pass the directory of a Hugging Face tokenizer")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("--tokenizer needs the package tokenizers: pip install 'headpond[tokenizers]'") from error
    tokenizer: Any = Tokenizer.from_file(str(path))

    def texts(ids: Sequence[int]) -> list[str]:
        return tokenizer.decode_batch([[id] for id in ids], skip_special_tokens=False)

    return texts


class Files(NamedTuple):
    columns: BlobRef | None
    experts: BlobRef | None


def files_of(result: dict[str, Any] | None, manifest: Manifest | None, rollout: str) -> Files:
    """A rollout's files, named by its result or by the manifest of its step."""
    if result:
        return Files(*(BlobRef(**result[kind]) if result.get(kind) else None for kind in ("columns", "experts")))
    for each in manifest.plan.rollouts if manifest else ():
        if each.rollout == rollout:
            return Files(each.columns, each.experts)
    return Files(None, None)


def manifest_of(store: Store, step: int | None) -> Manifest | None:
    """None also if it is deleted or damaged."""
    try:
        return read_manifest(store, step) if step is not None else None
    except (BlobError, OSError):
        return None


def opened(store: Store, files: Files) -> Columns | None:
    """None if they are deleted. Not verified: looking must not read more than it shows."""
    if files.columns is None or files.columns.size == 0:
        return None
    try:
        return read_columns(store, files.columns, verify=False)
    except (BlobError, OSError):
        return None


# conversations


def conversations(columns: Columns) -> list[list[dict[str, Any]]]:
    """Messages with texts that are cut at TEXT_MOST characters; `length` has the whole length."""
    return [
        [_message(message) for message in _dicts(conversation)[:MESSAGES_MOST]]
        for conversation in _read(columns)
        if isinstance(conversation, list)
    ]


def message_part(columns: Columns, conversation: int, message: int, name: str, start: int) -> dict[str, Any]:
    """A part of a long text, from a character on; empty where there is none."""
    try:
        text = _texts(_dicts(_read(columns)[conversation])[message]).get(name, "")
    except IndexError:
        text = ""
    return {"text": text[start : start + PART_MOST], "length": len(text)}


def _read(columns: Columns) -> list[Any]:
    try:
        content: Any = orjson.loads(columns.conversation.tobytes())
    except ValueError:
        return []
    return content if isinstance(content, list) else []


def _dicts(conversation: Any) -> list[dict[str, Any]]:
    return [message for message in conversation if isinstance(message, dict)] if isinstance(conversation, list) else []


def _message(message: dict[str, Any]) -> dict[str, Any]:
    texts = _texts(message)
    return {
        "role": str(message.get("role", "")),
        "parts": [{"name": name, "text": text[:TEXT_MOST], "length": len(text)} for name, text in texts.items()],
    }


def _texts(message: dict[str, Any]) -> dict[str, str]:
    """Every field of a message as text, `content` first."""
    fields = {"content": message.get("content"), **message}
    return {name: _text(value) for name, value in fields.items() if name != "role" and value not in (None, "", [])}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


# timeline


def timeline(columns: Columns) -> list[dict[str, Any]]:
    """Turns, tools, grading and programs in the order in which they began, in seconds from the first of them; empty for
    recordings of earlier releases. The clocks of the session server and of the worker are taken to agree."""
    table = columns.turns
    spans = [TimedSpan(*each) for each in columns.spans]
    if table.begun_at is not None and table.seconds is not None:
        begun = zip(table.begun_at.tolist(), table.seconds.tolist(), strict=True)
        spans += [TimedSpan("turn", str(number), *times) for number, times in enumerate(begun) if times[0]]
    first = min((span.begun_at for span in spans), default=0.0)
    return [
        {"kind": kind, "name": name, "begin_s": round(begun_at - first, DIGITS), "seconds": round(seconds, DIGITS)}
        for kind, name, begun_at, seconds in sorted(spans, key=lambda span: span.begun_at)[:SPANS_SHOWN]
    ]


# tokens


def token_page(
    columns: Columns, start: int, count: int, *, texts: TokenTexts | None, extra: dict[str, Array]
) -> dict[str, Any]:
    """Tokens from `start` on. `extra` has arrays of all tokens, NaN where unknown."""
    part = slice(max(0, start), max(0, start) + min(count, TOKENS_MOST))
    ids = columns.input_ids[part].tolist()
    values = {
        "logprob": _numbers(np.where(columns.loss_mask[part] > 0, columns.logprobs[part], np.nan)),
        **{name: _numbers(array[part]) for name, array in extra.items()},
    }
    return {
        "tokens": int(columns.input_ids.size),
        "start": part.start,
        "ids": ids,
        "mask": columns.loss_mask[part].tolist(),
        "version": versions(columns)[part].tolist(),
        "values": values,
        "texts": texts(ids) if texts else None,
        "samples": [[int(a), int(b)] for a, b in pairwise(columns.sample_offsets.tolist())],
        "turns": turns(columns),
    }


def _numbers(array: Array) -> list[float | None]:
    return [None if value != value else round(value, DIGITS) for value in array.tolist()]


def versions(columns: Columns) -> Array:
    """The policy version that sampled each token; -1 on context."""
    found = np.full(columns.input_ids.size, -1, np.int32)
    table = columns.turns
    for start, end, version in zip(table.start.tolist(), table.end.tolist(), table.version_first.tolist(), strict=True):
        found[start:end] = version
    for turn, start, version in zip(
        columns.span_turn.tolist(), columns.span_start.tolist(), columns.span_version.tolist(), strict=True
    ):
        found[start : int(table.end[turn])] = version
    return found


def turns(columns: Columns) -> list[dict[str, Any]]:
    table, words = columns.turns, columns.turns.words
    return [
        {
            "sample": int(table.sample[turn]),
            "start": int(table.start[turn]),
            "end": int(table.end[turn]),
            "version_first": int(table.version_first[turn]),
            "version_last": int(table.version_last[turn]),
            "version_exact": bool(table.version_exact[turn]),
            "temperature": round(float(table.temperature[turn]), DIGITS),
            **{name: words[name][int(getattr(table, name)[turn])] for name in ("finish_reason", "agent", "engine")},
        }
        for turn in range(table.sample.size)
    ]


def routed(store: Store, files: Files, tokens: int) -> dict[str, Array]:
    """Whether the engine sent routed experts of each token, while the file is kept."""
    if files.experts is None:
        return {}
    try:
        valid = Experts(store, files.experts, verify=False).routed_valid
    except (BlobError, OSError):
        return {}
    return {"routed": valid.astype(np.float32)} if valid.size == tokens else {}


def of_batch(
    run_dir: Path, store: Store, manifest: Manifest | None, rollout: str, columns: Columns
) -> dict[str, Array]:
    """Advantages of each token, and what the trainer annotated, from the rank files while they are kept."""
    extra: dict[str, Array] = {}
    if manifest is None or manifest.plan.format != "native":
        return extra
    number = next((n for n, each in enumerate(manifest.plan.rollouts) if each.rollout == rollout), None)
    for rank in manifest.ranks:
        try:
            arrays = tensors.read(store, rank.file, verify=False).arrays
        except (BlobError, OSError):
            continue
        annotated = read_annotations(run_dir, manifest.plan.step, rank.data_rank)
        annotated = {name: array for name, array in annotated.items() if array.size == arrays["input_ids"].size}
        for sample in np.flatnonzero(arrays[f"{SAMPLE}rollout_index"] == number).tolist():
            own, in_rank = _places(arrays, sample)
            own = slice(own.start, min(own.stop, columns.input_ids.size))
            in_rank = slice(in_rank.start, in_rank.start + own.stop - own.start)
            trained = arrays["loss_mask"][in_rank] > 0
            for name, array in {"advantage": arrays["advantages"], **annotated}.items():
                key = name if name == "advantage" else f"trainer {name}"
                whole = extra.setdefault(key, np.full(columns.input_ids.size, np.nan, np.float32))
                whole[own] = np.where(trained, array[in_rank], np.nan)
    if "trainer logprobs" in extra:
        extra["mismatch"] = extra["trainer logprobs"] - columns.logprobs
    return extra


def _places(arrays: dict[str, Array], sample: int) -> tuple[slice, slice]:
    """Where a sample of a rank lies among the tokens of its rollout, and among those of the rank."""
    micro_batch = int(np.searchsorted(arrays["sample_offsets"], sample, side="right")) - 1
    segment = sample - int(arrays["sample_offsets"][micro_batch])
    first = int(arrays["segment_offsets"][micro_batch]) + segment
    begin, end = (int(value) for value in arrays["cu_seqlens"][first : first + 2])
    base = int(arrays["token_offsets"][micro_batch])
    offset = int(arrays[f"{SAMPLE}rollout_offset"][sample])
    return slice(offset, offset + end - begin), slice(base + begin, base + end)
