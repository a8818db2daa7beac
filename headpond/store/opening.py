"""`open_store(url)`: the text before `://` names the class: `file`, `memory`, or `module:Class` for
a custom store.

Each process imports the class that its own configuration names. The run directory holds the URL
too. The trainer's reader, and commands that are given a run directory, have no configuration.
"""

import difflib
import functools
import json
import os
from pathlib import Path

from headpond.declarations.named_code import import_class
from headpond.errors import ConfigError
from headpond.ids import OWNER_KEY
from headpond.store.base import Store
from headpond.store.files import directory_of
from headpond.version import refuse_old_run

BUILT_IN = {"file": "headpond.store.files:FileStore", "memory": "headpond.store.memory:MemoryStore"}
FORMS = "write file:///absolute/path for a shared directory, or module:Class://address for a store of your own"


def open_store(url: str) -> Store:
    """Open the store at `url`, the same one for every call in a process. ConfigError if there is no
    such store."""
    return _opened(url, os.getpid())


def owner_of(store: Store) -> str | None:
    """The run that owns a store; None if no run does."""
    return store.read(OWNER_KEY).decode() if store.size(OWNER_KEY) is not None else None


def stored_url(run_dir: Path, url: str) -> str:
    """The store's URL as `run.json` holds it. A directory is held as a path, because a run may be
    moved."""
    return relative_path(run_dir, directory_of(url)) if url.startswith("file:") else url


def relative_path(run_dir: Path, path: Path) -> str:
    """`path` relative to `run_dir` if it lies inside, else unchanged."""
    root = run_dir.resolve()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def run_store_url(run_dir: Path, stored: str) -> str:
    """The inverse of `stored_url`."""
    return stored if "://" in stored else (run_dir.absolute() / stored).as_uri()


def read_run_store_url(run_dir: Path) -> str | None:
    """The URL of a run's store; None if no run has begun in `run_dir`."""
    path = run_dir / "run.json"
    try:
        content = json.loads(path.read_bytes())
        refuse_old_run(path, content)
        return run_store_url(run_dir, content["store"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): restore it, or pass the run's `store`") from error


@functools.lru_cache(maxsize=16)
def _opened(url: str, pid: int) -> Store:
    kind = _class_of(url)
    try:
        store = kind(url)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"store {url!r}: {kind.__name__} cannot be constructed: {error!r}") from error
    if getattr(store, "url", None) != url:
        raise ConfigError(f"store {url!r}: {kind.__name__}.__init__ must call super().__init__(url)")
    return store


def _class_of(url: str) -> type[Store]:
    name, separator, address = url.partition("://")
    if not separator:
        raise ConfigError(f"store {url!r} is not a URL: {FORMS}")
    if "@" in address.partition("/")[0]:
        raise ConfigError("store URLs are shown in logs and run.json: pass credentials in the environment, not in them")
    if ":" not in name:
        if name not in BUILT_IN:
            nearest = difflib.get_close_matches(name, BUILT_IN, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ConfigError(f"store {url!r}: there is no store {name!r}; {hint}{FORMS}")
        name = BUILT_IN[name]
    return import_class(name, setting="store", base=Store)
