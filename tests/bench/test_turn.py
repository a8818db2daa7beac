from bench.harness.section_timer import SECTIONS
from bench.turn import run


def test_a_turn_is_divided_into_its_parts() -> None:
    report = run(quick=True)
    assert (report.bench, report.quick, report.targets) == ("turn", True, [])
    figures = {name.removeprefix("1.3 MB: "): value for name, value in report.figures.items()}
    assert figures["CPU ms a turn"] > 0
    named = [f"{section}, ms" for section in SECTIONS]
    assert all(figures[name] > 0 for name in named if "read, other" not in name)  # small bodies are read on the loop
    kinds = ("loop", "CPU threads", "file threads", "Celery's thread", "other threads")
    assert sum(figures.get(f"{kind}, ms", 0.0) for kind in kinds) > 0.99 * figures["CPU ms a turn"]
