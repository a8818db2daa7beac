"""Small files of a batch or a trainer: whole or not there, and on the disk."""

from pathlib import Path

from penstock.store import atomic
from penstock.store.parts import writing


def replace(path: Path, content: bytes) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, content, durable=True)
        atomic.sync_directory(path.parent)


def create(path: Path, content: bytes) -> bool:
    """False when something is there already: it stays as it is."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            atomic.create(path, content)
        except FileExistsError:
            return False
        finally:
            for directory in (path.parent, path.parent.parent):  # the first file of a step made its directory too
                atomic.sync_directory(directory)
    return True
