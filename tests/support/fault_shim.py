"""`fault_shim.c`, compiled and steered: a process whose clock jumps and whose calls on files fail.

A process is started with `variables` in its environment. What `Faults` then sets holds for it at once, and for its
children.
"""

import errno
import hashlib
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
LAYOUT = struct.Struct("<q i I I I I 484s")
ERRORS = {name: getattr(errno, name) for name in ("ESTALE", "EIO", "ENOSPC", "EDQUOT")}
HOUR_S = 3600


class Calls(IntFlag):
    OPEN = 1
    WRITE = 2
    FSYNC = 4
    RENAME = 8
    LINK = 16
    UNLINK = 32
    CLOSE = 64


WRITING = Calls.OPEN | Calls.WRITE | Calls.FSYNC | Calls.RENAME | Calls.LINK | Calls.CLOSE


def library() -> Path:
    """The compiled shim, in a directory that the user's test runs share; named by its source."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "the shim needs a C compiler: install gcc"
    name = f"fault-shim-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    path = Path(tempfile.gettempdir()) / f"headpond-tests-{os.getuid()}" / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{os.getpid()}-{name}")
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(temporary), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        temporary.replace(path)
    return path


class Faults:
    """The faults of the processes that were started with its `variables`."""

    def __init__(self, control: Path) -> None:
        control.write_bytes(bytes(LAYOUT.size))
        with control.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), LAYOUT.size)
        self.variables = {"LD_PRELOAD": str(library()), "FAULT_CONTROL": str(control)}

    def jump(self, seconds: float) -> None:
        """Shift the clock, beside earlier jumps."""
        (shift_ns,) = struct.unpack_from("<q", self._mapped)
        struct.pack_into("<q", self._mapped, 0, shift_ns + round(seconds * 1e9))

    @contextmanager
    def failing(self, error: str, calls: Calls, below: Path, *, every: int = 1) -> Iterator[None]:
        """Every nth of the chosen calls on files below a directory fails."""
        (shift_ns,) = struct.unpack_from("<q", self._mapped)
        name = str(below).encode()
        assert len(name) < 484
        LAYOUT.pack_into(self._mapped, 0, shift_ns, 0, calls, every, 0, 0, name)
        struct.pack_into("<i", self._mapped, 8, ERRORS[error])
        try:
            yield
        finally:
            struct.pack_into("<i", self._mapped, 8, 0)

    @property
    def failed(self) -> int:
        """Calls that have failed since `failing` began."""
        return LAYOUT.unpack_from(self._mapped)[5]
