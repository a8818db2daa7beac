"""Directory stores for tests, and their contents for assertions."""

from dataclasses import replace
from pathlib import Path

from headpond.batches.manifest import manifest_key
from headpond.config import RunConfig
from headpond.store import BlobRef, Store, open_store
from headpond.store.columns import read_columns, write_columns
from headpond.store.files import FileStore, directory_of
from headpond.store.memory import MemoryStore


def directory_store(directory: Path) -> FileStore:
    store = open_store(directory.absolute().as_uri())
    assert isinstance(store, FileStore)
    return store


def blob_keys(store: Store, under: str) -> list[str]:
    """Keys of the blobs below a directory, sorted; unfinished files have none."""
    return sorted(store.keys(under))


def timeless_checksum(store: Store, ref: BlobRef) -> str:
    """Of the columns without the times of their turns, which differ each time."""
    columns = read_columns(store, ref)
    turns = replace(columns.turns, begun_at=None, seconds=None)
    metrics = {name: value for name, value in columns.metrics.items() if name != "engine_s"}
    timeless = replace(columns, turns=turns, metrics=metrics)
    return write_columns(MemoryStore("memory://timeless"), "columns", timeless).checksum


def manifest_path(store: FileStore, step: int) -> Path:
    return store.path(manifest_key(step))


def run_store(config: RunConfig) -> FileStore:
    return directory_store(directory_of(config.store_url))
