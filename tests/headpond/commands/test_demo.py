"""`headpond demo` with real processes, none of which outlives it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import MarkedProcesses
from support.stores import directory_store
from support.terminal import Terminal
from support.waiting import HANG_S, wait_until
from typer.testing import CliRunner

from headpond import config
from headpond.batches import read_manifests
from headpond.commands.demo import GROUP_SIZE, STEPS
from headpond.commands.demo_directory import make_run_dir, write_configuration
from headpond.commands.launcher import parts
from headpond.commands.main import app
from headpond.commands.modules import TEMPLATES
from headpond.demo import tiny_moe
from headpond.errors import ConfigError
from headpond.inspection.run_state import last_status
from headpond.records.status import Status

HEADPOND = str(Path(sys.executable).parent / "headpond")
SMALL = ["--rollouts-per-step", "24"]


class MarkedDemos(MarkedProcesses):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.demos: list[subprocess.Popen[str]] = []

    def start(self, *options: str) -> "subprocess.Popen[str]":
        command = [HEADPOND, "demo", *SMALL, *options]
        pipe = subprocess.PIPE
        demo = subprocess.Popen(command, env=self.env, cwd=self.directory, stdout=pipe, stderr=pipe, text=True)
        self.demos.append(demo)
        return demo

    def status(self, run: str = "demo-1") -> Status:
        return last_status(self.directory / "runs" / run)

    def wait_running(self) -> None:
        running = lambda: self.status().states.get("running")  # noqa: E731
        wait_until(running, what="running rollouts")


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[MarkedDemos]:
    marked = MarkedDemos(tmp_path)
    yield marked
    for demo in marked.demos:
        demo.kill()
        demo.communicate()
    marked.kill()


@pytest.mark.slow
def test_two_demos_at_once_deliver_their_steps_and_end(marked: MarkedDemos) -> None:
    demos = [marked.start("--steps", "2", "--json", *options) for options in ([], ["--keep"])]
    outputs = [demo.communicate(timeout=HANG_S) for demo in demos]
    assert [demo.returncode for demo in demos] == [0, 0], outputs
    marked.assert_nothing_left()
    summaries = [json.loads(out) for out, _ in outputs]
    assert {Path(each["paths"]["run"]).name for each in summaries} == {"demo-1", "demo-2"}
    for each in summaries:
        assert (each["ended"], each["delivered_steps"], each["trained_steps"]) == ("done", 2, 2)
        assert each["audit"]["balanced"]
        assert each["rollouts"]["in_flight"] == each["rollouts"]["dead"] == 0
        assert each["tokens"] > each["loss_tokens"] > 0
        assert each["routed_experts_bytes"] > 2 * 2 * each["tokens"]
        assert len(each["rewards"]) == 2
        assert each["last_rewards"].keys() == {"copy", "guess", "dictation"}
        assert each["alignment"]["tokens"] == each["loss_tokens"]
        assert 0 < each["alignment"]["aligned"] <= each["loss_tokens"]
        assert each["alignment"]["largest_difference"] < 1e-4
        assert each["event_loop_lag"]["orchestrator"]["max_s"] > 0
        assert {"run", "config", "logs", "manifest", "rollouts", "report"} <= each["paths"].keys()
        assert all(Path(path).exists() for path in each["paths"].values())
    released, kept = (Path(each["paths"]["run"]) for each in summaries)
    assert (kept / "redis").exists() > (released / "redis").exists()
    plans = [manifest.plan for manifest in read_manifests(directory_store(kept / "store")).values()]
    blobs = [blob for plan in plans for each in plan.rollouts for blob in (each.columns, each.experts) if blob]
    assert all((kept / "store" / blob.key).exists() for blob in blobs), "--keep releases no file"


@pytest.mark.slow
def test_a_killed_demo_leaves_no_process(marked: MarkedDemos) -> None:
    demo = marked.start("--steps", "1000")
    marked.wait_running()
    kinds = [
        "headpond demo",
        "headpond engine",
        "headpond.workers.rollouts",
        "headpond.workers.compute",
        "headpond run",
        "headpond sessions",
        "headpond dashboard",
        "numpy_trainer",
    ]
    assert all(any(kind in command for command in marked.processes().values()) for kind in kinds)
    demo.kill()
    marked.assert_nothing_left()


@pytest.mark.slow
def test_a_process_that_dies_is_named_with_the_end_of_its_log(marked: MarkedDemos) -> None:
    demo = marked.start("--steps", "1000")
    marked.wait_running()
    [engine] = [pid for pid, command in marked.processes().items() if "headpond engine" in command]
    os.kill(engine, signal.SIGKILL)
    out, err = demo.communicate(timeout=HANG_S)
    assert demo.returncode == 2
    log = marked.directory / "runs/demo-1/logs/engine.log"
    assert re.search(rf"^headpond: the engine .*signal 9.* {log}:", err, re.MULTILINE)
    assert "action=engine_ready" in err.rpartition("The end of")[2]
    assert "Traceback" not in out + err
    marked.assert_nothing_left()


@pytest.mark.timeout(900)
def test_ctrl_c_on_a_terminal_prints_a_summary(marked: MarkedDemos) -> None:
    run_dir = marked.directory / "watched"
    command = [HEADPOND, "demo", *SMALL, "--steps", "1000", "--run-dir", str(run_dir)]
    with Terminal(*command, env=marked.env) as terminal:
        # Six processes and a trainer that computes: with a load of 30 on two cores, three steps take two minutes.
        terminal.wait_for(r"trainer     step ([2-9]|\d{2,}): reward ", 4 * HANG_S)
        assert "action=weights_loaded" in (run_dir / "logs" / "orchestrator.log").read_text()
        terminal.press("\x03")
        assert terminal.wait(2 * HANG_S) == 128 + signal.SIGINT
    text = terminal.text
    assert "headpond demo: starting Redis" in text
    assert "action=ready process=rollouts" in text
    assert re.search(r"steps       \d+ of 1,000 delivered", text)
    summary = text.rpartition("demo        stopped by Ctrl-C after")[2]
    assert "read by the trainer" in summary
    assert "verdict     balanced: " in summary
    assert re.search(
        r"alignment   [\d,]+ of [\d,]+ logprobs computed again with the weights of \d+\s+versions", summary
    )
    assert re.search(r"reward      0\.\d\d in step 0, 0\.\d\d in step \d+", summary)
    assert "1.0 │" in summary
    assert re.search(r"inspect +\S+headpond audit", summary)
    assert "Traceback" not in text
    marked.assert_nothing_left()


def test_ctrl_c_twice_during_start_up_ends_the_demo(marked: MarkedDemos) -> None:
    demo = marked.start()
    wait_until(lambda: any("headpond run" in command for command in marked.processes().values()))
    demo.send_signal(signal.SIGINT)
    demo.send_signal(signal.SIGTERM)
    out, err = demo.communicate(timeout=HANG_S)
    assert demo.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM), err
    assert "Traceback" not in out + err
    marked.assert_nothing_left()


def test_a_demo_that_reaches_its_time_limit_drains(marked: MarkedDemos) -> None:
    code = "from headpond.commands import demo, main; demo.SECONDS = 0.0; main.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "demo"], env=marked.env, cwd=marked.directory, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "action=draining stopped by its time limit" in done.stderr
    marked.assert_nothing_left()


@pytest.mark.slow
def test_a_demo_that_was_stopped_is_resumed_by_its_configuration(marked: MarkedDemos) -> None:
    demo = marked.start("--steps", "1000")
    wait_until(lambda: marked.status().step, what="a step")
    demo.send_signal(signal.SIGTERM)
    _, err = demo.communicate(timeout=HANG_S)
    assert demo.returncode == 128 + signal.SIGTERM, err
    steps = marked.status().step + 2
    command = [HEADPOND, "up", "runs/demo-1/demo.toml", "--steps", str(steps), "--json"]
    done = subprocess.run(command, env=marked.env, cwd=marked.directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    assert (ended["step"], ended["phase"], ended["audit"]["balanced"]) == (steps, "done", True)
    training = (marked.directory / "runs" / "demo-1" / "training.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in training} == set(range(steps))
    marked.assert_nothing_left()


def test_the_configuration_in_the_run_directory_can_be_used_to_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "a 'directory'"
    run_dir.mkdir()
    path = write_configuration(run_dir, steps=3, groups=2, seed=4, keep=True)
    written = config.load(path, environ={})
    assert (written.run_dir, written.steps, written.batch.size, written.seed) == (run_dir, 3, 2, 4)
    assert f"headpond up {path}\n" in path.read_text()
    assert written.engine.command == "headpond engine --model tiny-moe --seed 4 --port {port}"
    trainer = [str(run_dir / "numpy_trainer.py"), str(run_dir), "--seed", "4", "--keep-batches"]
    assert parts.trainer(written).command == (sys.executable, *trainer)


def test_the_example_has_the_defaults_of_the_demo() -> None:
    example = config.load(TEMPLATES / "demo.toml", environ={})
    assert example.steps == STEPS
    assert example.rollouts.group_size == GROUP_SIZE
    assert example.batch.size * GROUP_SIZE == 96
    assert example.engine.routed_experts is True
    shape = (example.engine.hidden_layers, example.engine.experts_per_token, example.engine.moe_experts)
    assert shape == (tiny_moe.LAYERS, tiny_moe.TOPK, tiny_moe.EXPERTS)


def test_rollouts_per_step_must_be_a_multiple_of_the_group_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["demo", "--rollouts-per-step", "20"])
    assert isinstance(result.exception, ConfigError)
    assert re.search("--rollouts-per-step 20: .*8", str(result.exception))
    assert not list(tmp_path.iterdir())


def test_each_demo_gets_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [make_run_dir(None), make_run_dir(None)] == [tmp_path / "runs/demo-1", tmp_path / "runs/demo-2"]
    assert make_run_dir(Path("mine")) == tmp_path / "mine"
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ConfigError, match="mine is not empty"):
        make_run_dir(Path("mine"))
