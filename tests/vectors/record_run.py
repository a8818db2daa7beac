"""Records the run directory that tests/recovery/test_upgrade.py resumes: python tests/vectors/record_run.py.

Its orchestrator is killed when steps 0 and 1 are trained and step 2 is encoded, while other groups are in flight.
"""

import signal
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]  # the clone first: tests/headpond has no code


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if "logs" in Path(member.name).parts or Path(member.name).name == "lock" or member.name.endswith((".lock", "-shm")):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def main() -> None:
    from support.pipeline import pipeline_in
    from support.waiting import wait_until

    from headpond.batches import read_trainer
    from headpond.version import VERSION

    settings = {
        "batch": {"size": 2, "seq_len": 4096},
        "rollouts": {"group_size": 2, "max_in_flight": 8},
        "trainer": {"max_steps_ahead": "unlimited"},
    }
    with tempfile.TemporaryDirectory() as directory:
        with pipeline_in(Path(directory) / "pipeline", **settings) as pipeline:
            pipeline.new_run("recorded")
            cluster = pipeline.cluster
            cluster.rollout_worker()
            cluster.compute_worker()
            run = cluster.orchestrator(CRASH_AT="encoded:3")
            trainer = pipeline.trainer(checkpoint_every=1)
            assert run.wait() == -signal.SIGKILL, run.text
            wait_until(lambda: read_trainer(cluster.run_dir).checkpointed == 1, what="the trainer")
            trainer.kill()
            run_dir = cluster.run_dir
        with tarfile.open(HERE / f"run_of_{VERSION.replace('.', '_')}.tar.xz", "w:xz") as archive:
            archive.add(run_dir, ".", filter=without_owner)


if __name__ == "__main__":
    main()
