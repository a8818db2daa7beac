"""A run with an engine that aborts, cuts off thoughts, and leaves out logprobs and experts: none of it is trained."""

import json
from pathlib import Path

from support.pipeline import pipeline_in

from headpond.batches import BatchReader
from headpond.store.columns import read_columns

ODD = ("--failures", "abort=0.25,thought=0.1,sentinel=0.1,no_experts=0.1", "--length", "constant:40")
ENGINE = {"dialect": "generate", "absent_routes": "drop"}


def test_what_an_engine_says_oddly_is_continued_masked_or_dropped(tmp_path: Path) -> None:
    settings = {"policy": {"renderer": "bytes-chatml"}, "filters.zero_variance": {"mode": "off"}}
    with pipeline_in(tmp_path, *ODD, **settings) as pipeline:
        pipeline.new_run("odd", engine=ENGINE, steps=3, trainer={"max_steps_ahead": 1})
        cluster = pipeline.cluster
        cluster.rollout_worker()
        cluster.compute_worker()
        run = cluster.orchestrator()
        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        for batch in reader:
            for micro_batch in batch.micro_batches():
                trained = micro_batch.loss_mask == 1
                assert micro_batch.logprobs.min() > -10, "neither trained nor masked tokens have a sentinel"
                trained[micro_batch.cu_seqlens[1:] - 1] = False  # a sample's last token was never fed forward
                rows = micro_batch.routed_experts(missing=-1)
                assert (rows[trained] >= 0).all(), "every other trained token has its experts"
            reader.ack(batch.step)
        result = pipeline.finish(run)
        assert result["dead"] == 0
        assert result["filtered"]["absent_routes"] > 0
        columns = [
            read_columns(pipeline.store, rollout.columns)
            for manifest in pipeline.manifests.values()
            for rollout in manifest.plan.rollouts
        ]
        assert "abort" not in {word for each in columns for word in each.turns.words["finish_reason"]}
        lines = [json.loads(line) for line in (cluster.run_dir / "metrics.jsonl").read_text().splitlines()]
        for name in ("engine_aborts", "unknown_logprobs"):
            assert sum(line[f"metrics/sums/{name}"] for line in lines) > 0
        assert [line["metrics/sums/missing_routes"] for line in lines] == [0, 0, 0]
        assert sum(line["max_tokens_rate"] for line in lines) > 0
