from bench.harness.canary import Canary


def test_a_canary_can_measure_repeatedly() -> None:
    with Canary() as canary:
        canary.begin()
        first = canary.end()
        canary.begin()
        second = canary.end()
    assert first.process == second.process == "canary"
    assert 0 <= second.p99_s <= second.max_s
