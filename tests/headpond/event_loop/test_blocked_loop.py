import threading

from support.waiting import wait_until

from headpond.event_loop.loop_lag import blocked_cause, blocked_place


def test_the_place_is_that_of_the_code_which_waits() -> None:
    opened = threading.Event()

    def rollout() -> None:
        opened.wait()

    thread = threading.Thread(target=rollout)
    thread.start()
    named = "rollout (event_loop/test_blocked_loop.py:12)"
    wait_until(lambda: named in blocked_place(thread.ident or 0), what="the place")
    opened.set()
    thread.join()
    assert blocked_place(0) == "an unknown place"


def test_what_a_worker_says_is_shown_in_one_line_of_bounded_length() -> None:
    text = blocked_cause("w\x1b[2J@vm", "soon", "x" * 10_000 + "\nrollout (bad.py:12)")
    assert "worker w?[2J@vm has been blocked for some s by xxx" in text
    assert "xxx?rollout (bad.py:12), and its" in text
    assert text.isprintable()
    assert len(text) < 1000
