import contextlib
import io
import logging
import os
import pty
import threading
from collections.abc import Iterable
from typing import Any

import pytest
from rich.console import Console

from headpond.commands.facts import Fact
from headpond.commands.live import ConsoleHandler, LiveView, view
from headpond.records.status import Status

STATUS: dict[str, Any] = {
    "run": "0badcafe", "phase": "running", "running_s": 75.0, "step": 3, "steps": 10, "rollouts_per_s": 12.5,
    "rollouts": {"planned": 64, "delivered": 24, "filtered": {"noop": 2}, "in_flight": 37, "dead": 1, "fenced": 4},
    "states": {"running": 30, "admitted": 7}, "queued": {"rollouts": 5, "filtering": 0},
    "running_by_worker": {"host-1": 30}, "waiting_for": [], "event_loop_lag": {"p99_s": 0.004, "max_s": 0.02},
    "tokens_per_s": 640.0, "other_loops": {"rollouts@host-1": {"p99_s": 0.03, "max_s": 0.04}},
}  # fmt: skip


def drawn(status: dict[str, Any], width: int = 100, more_facts: Iterable[Fact] = ()) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False)
    console.print(view(Status.model_validate(status), more_facts))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_view_shows_the_status_of_the_run() -> None:
    text = drawn(STATUS)
    for line in (
        "run         0badcafe, 1 min 15 s",
        "steps       3 of 10 delivered",
        "rollouts    64 planned = 24 delivered + 2 filtered + 37 in flight + 1 dead; 4 fenced",
        "in flight   running 30, admitted 7",
        "filtered    noop 2",
        "speed       12.5 rollouts/s, 640 tokens/s",
        "queues      rollouts 5, filtering 0",
        "workers     30 jobs running: host-1 30",
        "loop lag    p99 4.0 ms, max 20 ms (orchestrator)",
        "            p99 30 ms, max 40 ms (largest of 1 other process)",
    ):
        assert line in text
    assert "waiting for" not in text


def test_what_the_run_waits_for_is_framed_and_not_read_as_markup() -> None:
    text = drawn(STATUS | {"waiting_for": ["Redis [at x] does not answer", "the ledger cannot be written"]})
    assert "─ waiting for ─" in text
    assert "│ Redis [at x] does not answer" in text
    assert "│ the ledger cannot be written" in text


def test_a_draining_run_is_marked() -> None:
    assert "0badcafe, 1 min 15 s, draining" in drawn(STATUS | {"phase": "draining"})


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_wraps_lines(width: int) -> None:
    text = " ".join(drawn(STATUS, width).split())
    assert "24 delivered" in text
    assert "1 dead; 4 fenced" in text


def test_log_lines_that_repeat_the_view_are_left_out() -> None:
    console = Console(file=io.StringIO(), width=200)
    handler = ConsoleHandler(console)
    for level, message in (
        (logging.INFO, "action=progress step=1"),
        (logging.INFO, "action=delivered step=1"),
        (logging.INFO, "action=loop_lag p99_s=0.01"),
        (logging.WARNING, "action=loop_lag p99_s=9.99"),
    ):
        handler.emit(logging.LogRecord("headpond", level, "", 0, message, None, None))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line[9:] for line in text.splitlines()] == ["action=delivered step=1", "action=loop_lag p99_s=9.99"]


def test_a_stopped_terminal_does_not_block_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal's buffer is full and not read: logging and updating the status do not block."""
    keyboard, screen = pty.openpty()
    written: list[bytes] = []

    def read_until_closed() -> None:
        with contextlib.suppress(OSError):
            while block := os.read(keyboard, 65536):
                written.append(block)

    reader = threading.Thread(target=read_until_closed)
    with os.fdopen(screen, "w") as file:
        monkeypatch.setattr("headpond.commands.live.MAX_RECORDS", 100)
        monkeypatch.setattr("sys.stderr", file)
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        with LiveView(Console(file=file, force_terminal=True, width=100)) as shown:
            for number in range(10_000):
                logging.getLogger("headpond").warning("action=test number=%d", number)
                shown.update(Status.model_validate(STATUS | {"step": number}))
            reader.start()
    reader.join()
    os.close(keyboard)
    assert b"action=test number=0" in b"".join(written)
    assert b"".join(written).count(b"action=test number=") < 10_000, "what does not fit is dropped"


def test_more_facts_are_shown_before_and_below_the_status() -> None:
    facts = [Fact("starting", "engine")]
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None, highlight=False)
    console.print(LiveView(console, more_facts=lambda: facts).draw())
    assert "starting    engine" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "trainer     step 3" in drawn(STATUS, more_facts=[Fact("trainer", "step 3")])
