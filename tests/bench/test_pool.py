from bench.pool import run


def test_both_pools_run_the_same_tasks() -> None:
    report = run(quick=True)  # waits until every task has succeeded
    assert list(report.figures) == ["asyncio, CPU ms a task", "solo, CPU ms a task"]
