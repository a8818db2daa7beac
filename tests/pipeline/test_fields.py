"""A field of one's own: an environment outside the project and one declaration, up to the trainer's micro-batch."""

from pathlib import Path

import numpy as np
from support.cluster import cluster_in
from support.engine_process import EngineProcess
from support.stores import directory_store

from headpond import BatchReader
from headpond.batches import read_manifests

ENVIRONMENT = """
import numpy as np
from headpond import Score

class Outside:
    examples = range(4)

    async def rollout(self, example, policy):
        messages = [{"role": "user", "content": f"number {example}"}]
        for _ in range(2):
            completion = await policy.chat(messages)
            completion.fields["after"] = completion.token_ids + 1
            messages += [completion.message, {"role": "user", "content": "and then?"}]
        await policy.chat([{"role": "user", "content": "another conversation"}], agent="other")
        samples = policy.sample_ids()
        fields = {"copy": np.concatenate(samples), "length": [len(ids) for ids in samples], "example": example}
        return Score(reward=float(len(samples[0]) % 7), columns=fields)
"""
DECLARED = """
[environments.outside]
use = "outside:Outside"
[batch.fields]
copy = { dtype = "i32", default = -7 }
length = { per = "sample", dtype = "i64", default = "required" }
example = { per = "sample", dtype = "u8" }
after = { source = "turn", dtype = "i32", default = -9 }
"""


def test_fields_of_scores_and_turns_reach_the_trainer_at_their_positions(tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path)
    try:
        host, port = engine.address
        settings = {
            "steps": 2,
            "engine": {"urls": [f"http://{host}:{port}"]},
            "rollouts": {"group_size": 2},
            "batch": {"size": 3, "data_ranks": 2, "seq_len": 2048, "pad_to_multiple_of": 64},
            "advantages": {"estimator": "none"},
        }
        with cluster_in(tmp_path, **settings) as cluster:
            (cluster.directory / "outside.py").write_text(ENVIRONMENT)
            cluster.add_environments(DECLARED)
            cluster.rollout_worker(PYTHONPATH=f"{Path(__file__).parents[2]}:{cluster.directory}")
            cluster.compute_worker()
            run = cluster.orchestrator()
            assert run.wait(90) == 0, run.text[-3000:]
            result = cluster.audit()
            assert result["balanced"], result["problems"]
            readers = [
                BatchReader(cluster.run_dir, data_rank=rank, data_ranks=2, store=f"file://{cluster.store}", timeout_s=0)
                for rank in range(2)
            ]
            padded = assert_fields(readers)
            assert padded, "no micro-batch is padded"
            manifests = read_manifests(directory_store(cluster.store)).values()
            assert [len(manifest.plan.rollouts) for manifest in manifests] == [6, 6]
    finally:
        engine.end()


def assert_fields(readers: list[BatchReader]) -> int:
    """Every value against its token or sample; returns the number of padding tokens."""
    padded = samples = 0
    for batch in (batch for reader in readers for batch in reader):
        for mb in batch.micro_batches():
            count = mb.samples.reward.size
            tokens = int(mb.cu_seqlens[count])
            np.testing.assert_array_equal(mb.fields["copy"][:tokens], mb.input_ids[:tokens])
            assert set(mb.fields["copy"][tokens:].tolist()) <= {-7}
            np.testing.assert_array_equal(mb.fields["length"], np.diff(mb.cu_seqlens)[:count])
            assert mb.fields["example"].size == count
            first = np.repeat(mb.samples.sample_in_rollout == 0, np.diff(mb.cu_seqlens)[:count])
            carried = np.flatnonzero(first & (mb.versions[:tokens] >= 0))
            expected = np.full(mb.input_ids.size, -9)
            expected[carried] = mb.input_ids[carried] + 1
            np.testing.assert_array_equal(mb.fields["after"], expected)
            assert carried.size or count == 0 or not (mb.samples.sample_in_rollout == 0).any()
            dtypes = {name: array.dtype.name for name, array in mb.fields.items()}
            assert dtypes == {"after": "int32", "copy": "int32", "example": "uint8", "length": "int64"}
            padded, samples = padded + mb.input_ids.size - tokens, samples + count
    assert samples == 2 * 6 * 2, "two steps of six rollouts with two samples each"
    return padded
