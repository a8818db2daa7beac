"""The example trainer in an environment without the packages of `headpond[app]`."""

import subprocess
import sys
from pathlib import Path

from support import trainer
from support.rollouts import MadeTurn, RolloutMaker, plan_of, seal
from support.stores import directory_store

from headpond.batches import RunStatus, read_manifest, read_trainer, write_status

TOY_TRAINER = Path(__file__).parents[2] / "examples" / "toy_trainer.py"
BARE = 'import runpy, sys; sys.meta_path.insert(0, runpy.run_path(sys.argv[1])["Refusing"]()); del sys.argv[:2]; '
BARE += 'runpy.run_path(sys.argv[0], run_name="__main__")'


def seal_steps(run_dir: Path, *, steps: int, experts: str | None) -> None:
    store = directory_store(run_dir / "store")
    for step in range(steps):
        maker = RolloutMaker(store=store, seed=step, experts=experts)
        rollouts = [maker.make(f"s{step}-{n}", [[MadeTurn(context=3, completion=9)]]) for n in range(6)]
        seal(store, plan_of(rollouts, step=step, data_ranks=1))
    write_status(run_dir, RunStatus(why="all steps are done", ended=True, last_step=steps - 1))


def train(run_dir: Path, *options: str) -> list[str]:
    command = [sys.executable, "-c", BARE, trainer.__file__, str(TOY_TRAINER), str(run_dir), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_reads_every_step_and_acknowledges_it(tmp_path: Path) -> None:
    seal_steps(tmp_path, steps=3, experts="uint8")
    lines = train(tmp_path)
    assert [line.partition(":")[0] for line in lines] == ["step 0", "step 1", "step 2"]
    sealed = read_manifest(directory_store(tmp_path / "store"), 0)
    assert sealed
    assert f"step 0: 6 rollouts, {sealed.totals.tokens} tokens in " in lines[0]
    assert f"weight {sealed.totals.loss_tokens}, advantage " in lines[0], "every token of the loss counts once"
    assert not lines[0].endswith(" 0 routed")
    state = read_trainer(tmp_path)
    assert (state.acked, state.checkpointed) == (2, 1)
    assert state.policy
    assert state.policy.version == 3


def test_it_resumes_and_needs_no_routed_experts(tmp_path: Path) -> None:
    seal_steps(tmp_path, steps=3, experts=None)
    lines = train(tmp_path, "--resume-step", "1", "--checkpoint-every", "0")
    assert len(lines) == 1
    assert lines[0].startswith("step 2: 6 rollouts")
    assert lines[0].endswith(" 0 routed")
    assert read_trainer(tmp_path).checkpointed == -1, "without a checkpoint nothing is released"
