"""A directory of one process over another store. Blobs are opened from the other; all else happens
in the directory."""

from headpond.store.base import BlobRef, Bytes, Store
from headpond.store.files import FileStore


class ReadThroughStore(FileStore):
    def __init__(self, url: str, source: Store) -> None:
        super().__init__(url)
        self._source = source

    def open(self, ref: BlobRef, *, verify: bool = True) -> Bytes:
        return self._source.open(ref, verify=verify)
