import orjson

from bench.harness.response_bodies import Rollout
from bench.ingest import joined, parse_all, run

ROLLOUT = Rollout(turns=4, tokens=50, sampled=0.25, layers=3, topk=2)


def test_both_methods_return_the_arrays_of_the_bodies() -> None:
    bodies = list(ROLLOUT.bodies())
    ours, baseline = joined(bodies), parse_all(bodies)
    assert ours.same(baseline)
    assert ours.ids.tolist() == ROLLOUT.ids().tolist()
    assert ours.rows.tolist() == ROLLOUT.rows()[:-1].tolist()
    assert ours.logprobs.shape == ours.ids.shape


def test_every_body_carries_the_whole_prefix() -> None:
    for body, (prompt, total) in zip(ROLLOUT.bodies(), ROLLOUT.spans(), strict=True):
        response = orjson.loads(body)
        choice = response["choices"][0]
        assert len(response["prompt_token_ids"]) == prompt
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == total - prompt
        assert choice["routed_experts"]["shape"] == [total - 1, 3, 2]


def test_a_quick_run_reports_every_target() -> None:
    report = run(quick=True)
    assert report.bench == "ingest"
    assert [target.name for target in report.targets] == [
        "50 turns: times faster",
        "50 turns: rows written, times copy and write",
        "8 turns: times faster",
        "8 turns: rows written, times copy and write",
        "50 turns: peak (MB)",
    ]
    assert all(value > 0 for value in report.figures.values())
    assert {name.split(",")[0] for name in report.figures} == {"50 turns", "8 turns"}
