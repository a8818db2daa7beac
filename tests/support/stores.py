"""The contents of a store, for assertions."""

from penstock.store import Store
from penstock.store.base import KEY


def blob_keys(store: Store, under: str) -> list[str]:
    """Keys of the blobs below a directory, sorted; unfinished files have none."""
    files = (path for path in store.path(under).rglob("*") if path.is_file())
    return sorted(key for path in files if KEY.fullmatch(key := path.relative_to(store.root).as_posix()))
