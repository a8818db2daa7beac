"""A store in the memory of one process, `memory://NAME`: for tests. It has no local files of its own."""

import threading
from collections import defaultdict
from collections.abc import Iterator

from headpond.store.base import Store

_blobs: defaultdict[str, dict[str, bytes]] = defaultdict(dict)  # name of a store -> key -> content
_creating = threading.Lock()


class MemoryStore(Store):
    shared = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._content = _blobs[self.address]

    def write(self, key: str, content: bytes | memoryview) -> None:
        self._content[key] = bytes(content)

    def create(self, key: str, content: bytes) -> bool:
        with _creating:
            if key in self._content:
                return False
            self.write(key, content)
            return True

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            return self._content[key][start:stop]
        except KeyError:
            raise self.missing(key) from None

    def size(self, key: str) -> int | None:
        return len(self._content[key]) if key in self._content else None

    def keys(self, under: str) -> Iterator[str]:
        return (key for key in list(self._content) if key.startswith(f"{under}/"))

    def delete(self, key: str) -> None:
        self._content.pop(key, None)
