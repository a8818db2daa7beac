"""Small files that are whole or not there: written under a temporary name, synced, then renamed or linked in place."""

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import BlobUnwritten


def replace(path: Path, content: bytes) -> None:
    with _temporary(path, content) as temporary:
        temporary.replace(path)


def create(path: Path, content: bytes) -> bool:
    """False when something is there already: it stays as it is."""
    with _temporary(path, content) as temporary:
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
    return True


@contextmanager
def writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise BlobUnwritten(f"cannot write {path}: {error.strerror}; check the space and rights there") from error


@contextmanager
def _temporary(path: Path, content: bytes) -> Generator[Path]:
    """A synced file beside `path`, gone afterwards unless it was renamed; then the directory is synced."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
        _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
