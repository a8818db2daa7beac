"""Directory stores for tests, and their contents for assertions."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from headpond.batches.manifest import manifest_key
from headpond.config import RunConfig
from headpond.store import BlobRef, Store, open_store
from headpond.store.columns import Columns, read_columns, write_columns
from headpond.store.files import FileStore, directory_of
from headpond.store.memory import MemoryStore


def directory_store(directory: Path) -> FileStore:
    store = open_store(directory.absolute().as_uri())
    assert isinstance(store, FileStore)
    return store


def blob_keys(store: Store, under: str) -> list[str]:
    """Keys of the blobs below a directory, sorted; unfinished files have none."""
    return sorted(store.keys(under))


def timeless_checksum(store: Store, ref: BlobRef, *, seen: bool = False) -> str:
    """Of the columns without the times of their turns, which differ each time. With `seen`, as if clients had every
    answer."""
    columns = read_columns(store, ref)
    columns = _with_seen_turns(columns) if seen else columns
    turns = replace(columns.turns, begun_at=None, seconds=None)
    metrics = {name: value for name, value in columns.metrics.items() if name != "engine_s"}
    timeless = replace(columns, turns=turns, metrics=metrics)
    return write_columns(MemoryStore("memory://timeless"), "columns", timeless).checksum


def _with_seen_turns(columns: Columns) -> Columns:
    turns, mask = columns.turns, columns.loss_mask.copy()
    assert turns.unseen is not None
    for turn in np.flatnonzero(turns.unseen):
        tokens = slice(turns.start[turn], turns.end[turn])
        assert not mask[tokens].any()
        mask[tokens] = 1
    metrics = {**columns.metrics, "unseen_turns": 0}
    return replace(columns, loss_mask=mask, turns=replace(turns, unseen=np.zeros_like(turns.unseen)), metrics=metrics)


def manifest_path(store: FileStore, step: int) -> Path:
    return store.path(manifest_key(step))


def run_store(config: RunConfig) -> FileStore:
    return directory_store(directory_of(config.store_url))
