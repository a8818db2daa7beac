"""Well-behaved and failing graders for tests. Imports are few: every grader process imports this module."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def same(answer: str, truth: str) -> float:
    return float(answer == truth)


def echo(*what: Any) -> Any:
    return what


def score(reward: float, *, columns: bool = False) -> Any:
    from headpond.environments.protocol import Score

    return Score(reward=reward, rewards={"right": reward}, metrics={"tests": 3}, columns={"c": 1} if columns else {})


def with_columns(reward: float) -> Any:
    return score(reward, columns=True)


def process(_: str = "") -> int:
    return os.getpid()


def settings() -> dict[str, str]:
    return {**os.environ, "argv": " ".join(sys.argv), "modules": " ".join(sys.modules)}


def loops(pid_file: str) -> float:
    Path(pid_file).write_text(str(os.getpid()))
    while True:
        pass


def catastrophic(answer: str) -> bool:
    return bool(re.match(r"(a+)+$", answer))


def catastrophic_by_name(pid_file: str) -> bool:
    """`re` holds the GIL: no other thread and no signal handler runs."""
    Path(pid_file).write_text(str(os.getpid()))
    return catastrophic("a" * 60 + "b")


def waits(begun: str, until: str) -> int:
    Path(begun).write_text(str(os.getpid()))
    while not Path(until).exists():
        time.sleep(0.01)
    return os.getpid()


def takes(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def exits(_: str) -> None:
    os._exit(3)


def calls_exit(_: str) -> None:
    sys.exit("done")


def segfaults(_: str) -> None:
    import ctypes

    ctypes.string_at(0)


def is_killed(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def closes_everything(_: str) -> None:
    os.closerange(0, 100)
    while True:
        time.sleep(1)


def answers_out_of_turn(_: str) -> float:
    """As code in an answer could do if the grader executed it."""
    for number in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(number, b"[1]\n")
    return 0.0


def needs_memory(_: str) -> int:
    return len("x" * (1 << 31))


def goes_deep(answer: str) -> Any:
    return goes_deep(answer)


def raises(answer: str) -> float:
    return {}[answer]


def raises_kind(kind: str) -> float:
    from headpond import errors

    raise getattr(errors, kind)("raised by the judge")


def returns_an_object(_: str) -> Any:
    return object()


def returns_much(_: str) -> str:
    return "x" * 100_000


def returns_numpy() -> Any:
    import numpy as np

    return {"right": np.bool_(True), "share": np.float32(0.5)}


def starts_another(pid_file: str) -> None:
    other = subprocess.Popen(["sleep", "1000"])
    Path(pid_file).write_text(f"{os.getpid()} {other.pid}")
    other.wait()


class Judge:
    @staticmethod
    def judge(answer: str) -> float:
        return 1.0
