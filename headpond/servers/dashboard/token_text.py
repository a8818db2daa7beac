"""Text of single tokens: from the directory of a tokenizer, from ChatML over bytes, or none."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from headpond.errors import ConfigError
from headpond.renderers.bytes_chatml import MESSAGE_END, MESSAGE_START

TokenTexts = Callable[[Sequence[int]], list[str]]
BYTES_CHATML = "bytes-chatml"
SPECIAL = {MESSAGE_START: "<|im_start|>", MESSAGE_END: "<|im_end|>"}


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
