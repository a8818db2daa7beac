from bench.harness.canary import Canary


def test_each_measurement_starts_anew() -> None:
    with Canary() as canary:
        canary.begin()
        first = canary.end()
        canary.begin()
        second = canary.end()
    assert first.process == second.process == "canary"
    assert 0 <= second.p99_s <= second.max_s
