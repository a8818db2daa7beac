import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.stores import directory_store

from headpond.errors import BlobCorrupt
from headpond.store import tensors
from headpond.store.columns import read_columns
from headpond.store.experts import Experts
from headpond.store.files import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path)


def test_other_blobs_are_refused_as_columns_and_experts(store: FileStore) -> None:
    refs = [
        store.put("text", [b"hello"]),
        store.put("zeros", [bytes(10_000)]),
        store.put("huge-header", [b"\xff" * 64]),
        store.put("list", [(2).to_bytes(8, "little"), b"[]"]),
        store.put("nothing", []),
        tensors.write(store, "other", {"x": np.zeros(3)}, {}),
        tensors.write(store, "half", {"input_ids": np.zeros(3, np.int32)}, {"format": "headpond.columns.1"}),
    ]
    for ref in refs:
        with pytest.raises(BlobCorrupt, match=f"blob {ref.key} is "):
            read_columns(store, ref)
        with pytest.raises(BlobCorrupt, match=f"blob {ref.key} is "):
            Experts(store, ref)


@pytest.mark.parametrize(
    "entry",
    [
        '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,3]}',
        '"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}',
        '"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}',
        '"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}',
        '"a":{"dtype":"Q8","shape":[4],"data_offsets":[0,4]}',
        '"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,4]}',
        '"a":{"dtype":"U8","shape":[4]}',
        '"a":7',
    ],
)
def test_a_header_that_contradicts_its_file_is_refused(store: FileStore, entry: str) -> None:
    text = f"{{{entry}}}".encode()
    ref = store.put("lies", [len(text).to_bytes(8, "little"), text, b"1234"])
    with pytest.raises(BlobCorrupt, match="lies"):
        tensors.read(store, ref)


BARE = """
import sys
class Bare:
    allowed = {"numpy", "xxhash", "_xxhash", "headpond", *sys.stdlib_module_names}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.allowed:
            raise ImportError(f"{name} is not there in a bare environment")
sys.meta_path.insert(0, Bare())
import headpond.store.columns, headpond.store.experts
"""


def test_blobs_need_only_numpy_and_xxhash() -> None:
    run = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
