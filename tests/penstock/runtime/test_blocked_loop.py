import functools
import threading
from collections.abc import Callable

import pytest
from support.waiting import wait_until

from penstock.runtime import blocked_loop

OWN, INSTALLED = f"{blocked_loop.OWN[0]}x.py", f"{blocked_loop.INSTALLED[0]}x.py"
STDLIB = f"{blocked_loop.STDLIB[0]}x.py"


def inside(file: str, call: Callable[[], object]) -> Callable[[], object]:
    """Calls it on line 2 of the file."""
    names: dict[str, Callable[..., object]] = {}
    exec(compile("def rollout(call):\n    call()", file, "exec"), names)
    return functools.partial(names["rollout"], call)


@pytest.mark.parametrize(
    ("outermost_first", "named"),
    [
        ([OWN, "/home/env.py", STDLIB, "/home/bad.py", INSTALLED, STDLIB], "/home/bad.py"),
        ([OWN, "/home/bad.py", OWN, STDLIB], "/home/bad.py"),
        ([OWN, INSTALLED, OWN], INSTALLED),
        ([STDLIB, OWN, STDLIB], OWN),
    ],
)
def test_the_place_is_the_innermost_line_of_the_users_code_or_the_nearest_to_it(
    outermost_first: list[str], named: str
) -> None:
    opened = threading.Event()
    target: Callable[[], object] = opened.wait
    for file in reversed(outermost_first):
        target = inside(file, target)
    thread = threading.Thread(target=target)
    thread.start()
    assert thread.ident
    wait_until(lambda: blocked_loop.place(thread.ident or 0) == f"{named}:2 (rollout)", what=f"the place {named}")
    opened.set()
    thread.join()
    assert blocked_loop.place(0) == "an unknown place"


def test_what_a_worker_says_is_shown_in_one_line_of_bounded_length() -> None:
    text = blocked_loop.cause("w\x1b[2J@vm", "soon", "x" * 10_000 + "\n/bad.py:12 (rollout)")
    assert "worker w?[2J@vm has been blocked for some s at xxx" in text
    assert "xxx?/bad.py:12 (rollout), and its" in text
    assert text.isprintable()
    assert len(text) < 1000
