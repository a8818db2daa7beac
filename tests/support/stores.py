"""Directory stores for tests, and their contents for assertions."""

from pathlib import Path

from penstock.batches.manifest import manifest_key
from penstock.config import RunConfig
from penstock.store import Store, open_store
from penstock.store.files import FileStore, directory_of


def directory_store(directory: Path) -> FileStore:
    store = open_store(directory.absolute().as_uri())
    assert isinstance(store, FileStore)
    return store


def blob_keys(store: Store, under: str) -> list[str]:
    """Keys of the blobs below a directory, sorted; unfinished files have none."""
    return sorted(store.keys(under))


def manifest_path(store: FileStore, step: int) -> Path:
    return store.path(manifest_key(step))


def run_store(config: RunConfig) -> FileStore:
    return directory_store(directory_of(config.store_url))
