"""Which URLs open which stores, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from support.stores import directory_store

from headpond.config import RunConfig, load
from headpond.errors import ConfigError
from headpond.store import open_store
from headpond.store.files import FileStore
from headpond.store.memory import MemoryStore
from headpond.store.opening import read_run_store_url, run_store_url, stored_url

ROOT = Path(__file__).parents[3]
SHELF = """
from headpond.store import Store
from headpond.store.memory import MemoryStore

class Shelf(MemoryStore):
    shared = True

class Drawer(Shelf):
    def __init__(self, url):
        pass

class Locked(Shelf):
    def __init__(self, url):
        raise ValueError("no such bucket")

class Half(Store):
    def read(self, key, start=0, stop=None): ...
    def write(self, key, content): ...

def shelf(url): ...
"""


@pytest.fixture(autouse=True)
def _shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelf_store.py").write_text(SHELF)
    (tmp_path / "broken_store.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)


def test_only_the_store_package_names_its_classes() -> None:
    """Everything else opens a store by its URL."""
    folders = ("headpond", "tasks", "workers", "orchestrator", "bench", "examples")
    named = re.compile(r"headpond\.store\.(files|memory)\b|\b(FileStore|MemoryStore)\b")
    using = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if named.search(path.read_text())]
    assert {path.parent for path in using} == {ROOT / "headpond" / "store"}


def test_what_stands_before_the_address_names_the_class() -> None:
    assert isinstance(open_store("file:///tmp/x"), FileStore)
    assert isinstance(open_store("memory://x"), MemoryStore)
    own = open_store("shelf_store:Shelf://bucket/prefix?region=here")
    assert (type(own).__name__, own.address) == ("Shelf", "bucket/prefix?region=here")
    assert str(own) == "shelf_store:Shelf://bucket/prefix?region=here"


@pytest.mark.parametrize("url", ["/plain/path", "s3://bucket/x", "file://host/path", "file:relative", ""])
def test_only_a_url_of_a_known_store_opens_one(url: str) -> None:
    with pytest.raises(ConfigError, match="file:///absolute/path"):
        open_store(url)


REFUSED = {
    "fil:///x": "there is no store 'fil'; did you mean 'file'? write file:///",
    "shelf_store:Shelv://x": "module shelf_store has no 'Shelv'; did you mean 'Shelf'?",
    "shelf_store:shelf://x": "is not a subclass of headpond.store.Store",
    "shelf_stor:Shelf://x": "No module named 'shelf_stor'; install it where this process runs, or add its directory",
    "broken_store:Shelf://x": "cannot be imported: ZeroDivisionError",
    "shelf_store:Half://x": "Half does not define create, delete, keys, size",
    "shelf_store:Drawer://x": "Drawer.__init__ must call super().__init__(url)",
    "shelf_store:Locked://x": "Locked cannot be constructed: ValueError('no such bucket')",
    "shelf_store:Shelf://me:secret@bucket": "pass credentials in the environment",
}


@pytest.mark.parametrize("url", REFUSED)
def test_a_wrong_store_is_refused_when_the_configuration_is_loaded(tmp_path: Path, url: str) -> None:
    path = tmp_path / "headpond.toml"
    path.write_text(f"seed = 1\nstore = '{url}'\n")
    with pytest.raises(ConfigError) as refused:
        load(path, environ={})
    assert str(refused.value).startswith(f"{path}, line 2: store: ")
    assert REFUSED[url] in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_store_that_one_process_sees_is_refused_for_a_run() -> None:
    with pytest.raises(ValueError, match=r"memory://x .*one process"):
        RunConfig(store="memory://x")


def test_a_quoted_path_means_the_same_everywhere(tmp_path: Path) -> None:
    url = (tmp_path / "a b").as_uri()
    assert "%20" in url
    config = RunConfig(run_dir=tmp_path / "run", store=url)
    store = open_store(config.store_url)
    assert isinstance(store, FileStore)
    assert store.root == tmp_path / "a b"
    assert run_store_url(config.run_dir, stored_url(config.run_dir, url)) == url


def test_a_run_directory_names_its_store_and_may_be_moved(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert read_run_store_url(run_dir) is None
    run_dir.mkdir()
    inside = RunConfig(run_dir=run_dir).store_url
    for url, stored in {
        inside: "store",
        "file:///elsewhere/a%20b": "/elsewhere/a b",
        "shelf_store:Shelf://bucket": "shelf_store:Shelf://bucket",
    }.items():
        assert stored_url(run_dir, url) == stored
        (run_dir / "run.json").write_text(json.dumps({"store": stored, "release": "0.2.0 (x)"}))
        assert read_run_store_url(run_dir) == url
    (run_dir / "run.json").write_text(json.dumps({"store": "store", "release": "0.2.0 (x)"}))
    moved = run_dir.rename(tmp_path / "moved")
    assert read_run_store_url(moved) == directory_store(moved / "store").url
    for damaged in ("{", "[]"):
        (moved / "run.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"run\.json is damaged"):
            read_run_store_url(moved)
