"""Keys and references of blobs, independent of where a store keeps their bytes."""

import re
from dataclasses import dataclass

from penstock.errors import BlobError

# No leading dot, so neither ".." nor the temporary name of an unfinished file is a key. 200 characters leave room for
# the rest of a temporary name.
NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}"
KEY = re.compile(rf"{NAME}(/{NAME})*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class BlobRef:
    """A blob by its key, with the size and checksum that its bytes must have."""

    key: str
    size: int
    checksum: str
    """xxh3 64, hexadecimal; `store/parts.py` defines the order of the bytes"""


def is_key(text: str) -> bool:
    return KEY.fullmatch(text) is not None


def check_key(key: str) -> None:
    if not is_key(key):
        raise BlobError(f"{key!r} is not a key: names of letters, digits, . _ - joined by /, none beginning with a dot")
