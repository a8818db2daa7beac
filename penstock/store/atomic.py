"""Small files that are there whole or not at all, with the umask's permissions; a killed writer's rest can be swept."""

import os
import uuid
from pathlib import Path


def write(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace what is at `path`."""
    temporary = _written(path, content, durable=durable)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def create(path: Path, content: bytes) -> None:
    """Durable. What is at `path` already stays, and raises FileExistsError."""
    temporary = _written(path, content, durable=True)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(directory: Path, name: str = "") -> None:
    """Remove what writers that were killed have left of files whose names begin with `name`."""
    for rest in directory.glob(f".{name}*.tmp"):
        rest.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _written(path: Path, content: bytes, *, durable: bool) -> Path:
    # A name of its own for every try: a cancelled one may still be writing in its thread.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
