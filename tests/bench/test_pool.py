from bench.pool import run


def test_both_pools_do_the_same_tasks() -> None:
    report = run(quick=True)  # waits until each has succeeded with all
    assert list(report.figures) == ["asyncio, CPU ms a task", "solo, CPU ms a task"]
