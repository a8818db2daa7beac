from bench.pool import WORKERS, run


def test_every_pool_does_the_same_tasks() -> None:
    report = run(quick=True)  # waits until each has succeeded with all
    assert list(report.figures) == [f"{pool}, CPU ms a task" for pool in WORKERS]
    assert all(value > 0 for value in report.figures.values())
