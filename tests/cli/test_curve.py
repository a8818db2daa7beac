"""The reward of a demo, drawn with characters."""

from pathlib import Path

from cli import curve


def test_a_bar_is_as_high_as_its_reward() -> None:
    lines = curve.drawn([0.0, 0.5, 1.0, 0.2], steps=4)
    width = curve.WIDTH // 4
    assert [line[5:].ljust(curve.WIDTH) for line in lines[: curve.HEIGHT]] == [
        "".join(bar * width for bar in bars) for bars in ("  █ ", "  █ ", " ▄█ ", " ██ ", "▁███")
    ]
    assert [line[:5] for line in lines[: curve.HEIGHT]] == ["1.0 │", "    │", "    │", "    │", "0.0 │"]
    assert lines[-1] == f"    └ step 0 {'─' * (curve.WIDTH - 15)} step 3"


def test_steps_to_come_are_blank_and_many_steps_are_averaged() -> None:
    begun = curve.drawn([1.0], steps=100)[0]
    assert begun == "1.0 │█"
    averaged = curve.drawn([0.0, 1.0] * curve.WIDTH, steps=2 * curve.WIDTH)
    assert {line[5:] for line in averaged[: curve.HEIGHT // 2]} == {""}
    assert averaged[curve.HEIGHT // 2][5:] == "▄" * curve.WIDTH


def test_every_line_fits_a_terminal() -> None:
    assert max(map(len, curve.drawn([0.7] * 24, steps=24))) + 12 <= 80


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert curve.read_lines(path) == []
    path.write_text('{"reward_mean": 0.5, "reward_mean/copy": 0.25, "tokens": 3}\n{"reward_me')
    [line] = curve.read_lines(path)
    assert (line[curve.MEAN], curve.by_environment(line)) == (0.5, {"copy": 0.25})
