import pytest

from headpond.commands import facts
from headpond.records.status import Status

ROLLOUTS = {"planned": 1050, "delivered": 1000, "filtered": {"gibberish": 20, "zero_variance": 10}, "in_flight": 15,
            "dead": 5, "fenced": 2}  # fmt: skip


def test_progress_of_a_status() -> None:
    states = {"running": 10, "admitted": 5, "delivered": 1000, "dead": 5, "filtered": 30}
    status = Status(step=3, steps=10, rollouts=ROLLOUTS, rollouts_per_s=12.34, tokens_per_s=4567.8, states=states)
    assert {label: text for label, text, _ in facts.progress(status)} == {
        "steps": "3 of 10 delivered",
        "rollouts": "1,050 planned = 1,000 delivered + 30 filtered + 15 in flight + 5 dead; 2 fenced",
        "in flight": "running 10, admitted 5",
        "filtered": "gibberish 20, zero_variance 10",
        "speed": "12.3 rollouts/s, 4,568 tokens/s",
    }


def test_what_a_terminal_would_obey_is_named_by_its_number() -> None:
    assert facts.printable("a\x1b[31m\rb\u2066c\ud83d") == "a⟨U+001B⟩[31m⟨U+000D⟩b⟨U+2066⟩c⟨U+D83D⟩"
    text = "line\n\tändern 水 😀, wide\u3000and fixed\u00a0spaces"
    assert facts.printable(text) == text


def test_unknown_numbers_are_omitted() -> None:
    assert list(facts.progress(Status())) == []


def test_the_busiest_workers_come_first_and_the_others_are_counted() -> None:
    running = {f"host-{number}": number for number in range(1, 13)}
    text = facts.workers(running).text
    assert text.startswith("78 jobs running: host-12 12, host-11 11,")
    assert text.endswith("host-5 5 and 4 more")
    assert facts.workers({"host-1": 1}).text == "1 job running: host-1 1"
    assert facts.workers({}).text == "no running jobs"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (12.34, "12.3 s"), (60, "1 min 0 s"), (3599.4, "59 min 59 s"), (3600, "1 h 0 min"),
     (90_061, "25 h 1 min")],
)  # fmt: skip
def test_durations_in_seconds_minutes_and_hours(seconds: float, text: str) -> None:
    assert facts.duration(seconds) == text


def test_lag_of_one_and_of_several_loops() -> None:
    assert facts.loop_lag({"p99_s": 0.0021, "max_s": 1.5}) == "p99 2.1 ms, max 1,500 ms"
    lags = {"a": {"p99_s": 0.02, "max_s": 0.03}, "b": {"p99_s": 0.01, "max_s": 0.05}}
    assert facts.largest_lag(lags) == "p99 20 ms, max 50 ms (largest of 2 other processes)"
    assert facts.largest_lag({"a": lags["a"]}) == "p99 20 ms, max 30 ms (largest of 1 other process)"
