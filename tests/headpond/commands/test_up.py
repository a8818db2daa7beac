"""`headpond up` with real processes: what it starts, starts again, stops, and leaves behind (nothing)."""

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
from support.terminal import Terminal
from support.waiting import HANG_S, wait_until

from headpond.inspection.run_state import last_status
from headpond.records.status import Status

HEADPOND = str(Path(sys.executable).parent / "headpond")
ROOT = Path(__file__).parents[3]
RUN = """
run_dir = "runs/test"
steps = 100000

[rollouts]
group_size = 4
max_in_flight = 16

[batch]
size = 2

[trainer]
max_steps_ahead = "unlimited"

[engine]
command = "headpond engine --port {port}"
versions = "announced"

[environments.paced]
use = "paced:Paced"
"""
PACED = """
import asyncio, random
from headpond import Score
from headpond.inspection.run_state import last_status
from headpond.records.status import Status

class Paced:
    def __init__(self, seconds: float = 0.3) -> None:
        self.seconds = seconds
        self.examples = range(1000)

    async def rollout(self, example, policy):
        await asyncio.sleep(self.seconds)
        await policy.chat([{"role": "user", "content": str(example)}])
        return Score(reward=random.random())
"""
HELD = "[environments.paced.options]\nseconds = 3600\n"
PARTS = ("headpond up", "headpond run", "headpond sessions", "headpond.workers.rollouts", "headpond.workers.compute")


class Started(MarkedProcesses):
    """`headpond up` in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.run_dir = directory / "runs" / "test"
        (directory / "tmp").mkdir()
        self.env |= {"TMPDIR": str(directory / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
        (directory / "paced.py").write_text(PACED)
        self.write(RUN)
        self.ups: list[subprocess.Popen[str]] = []

    def write(self, configuration: str) -> None:
        (self.directory / "run.toml").write_text(configuration)

    def write_sums(self, *, trainer: str, more: str = "") -> None:
        """Two steps with an engine and a trainer, as `headpond init` writes them."""
        for name in ("sums.py", "trainer.py"):
            source = ROOT / "examples" / "start" / name
            (self.directory / name).write_text(source.read_text())
        self.write(
            'steps = 2\n[engine]\ncommand = "headpond engine --port {port}"\n'
            'versions = "announced"\n[environments.sums]\nuse = "sums:Sums"\n[batch]\nsize = 2\n[trainer]\n'
            f'command = "{trainer}"\n{more}'
        )

    def start(self, *options: str, umask: int = -1, **variables: str) -> "subprocess.Popen[str]":
        command = [HEADPOND, "up", "run.toml", *options]
        up = subprocess.Popen(
            command, env=self.env | variables, cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, umask=umask,
        )  # fmt: skip
        self.ups.append(up)
        return up

    def status(self) -> Status:
        return last_status(self.run_dir)

    def wait_step(self, at_least: int = 1) -> None:
        wait_until(lambda: self.status().step >= at_least, what=f"step {at_least}")

    def assert_clean(self) -> None:
        """No process is left, and no file outside the run directory."""
        self.assert_nothing_left()
        files = {path.relative_to(self.directory) for path in self.directory.rglob("*")}
        files = {path for path in files if not path.is_relative_to("runs/test")}
        assert files == {Path("run.toml"), Path("paced.py"), Path("runs"), Path("tmp")}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    for up in started.ups:
        up.kill()
        up.communicate()
    started.kill()


def test_a_worker_that_dies_is_started_again_and_ctrl_c_drains(started: Started) -> None:
    screen = ["sh", "-c", f"cd {started.directory} && exec {HEADPOND} up run.toml"]
    with Terminal(*screen, env=started.env) as terminal:
        started.wait_step()
        assert all(started.running(part) for part in PARTS)
        [parent, *_] = started.running("headpond.workers.compute")
        os.kill(parent, signal.SIGKILL)
        wait_until(lambda: "compute was killed by signal 9" in terminal.text, what="the view to name the death")
        wait_until(lambda: "started again 1 time" in terminal.text, what="the view to name the restart")
        started.wait_step(started.status().step + 3)
        terminal.press("\x03")
        assert terminal.wait() == 0
    assert re.search("action=died process=compute .*signal 9; .*started again in 1 s", terminal.text)
    assert "action=draining" in terminal.text
    assert "stopped before its last step" in terminal.text
    assert "resume" in terminal.text
    assert "Traceback" not in terminal.text
    started.assert_clean()
    assert started.status().rollouts["balanced"]


def test_why_names_a_trainer_that_ended_in_the_middle(started: Started) -> None:
    ends = '[trainer]\ncommand = "echo no data left"'
    started.write(RUN.replace("[trainer]", ends))
    up = started.start()
    started.wait_step()

    def causes() -> list[str]:
        said = subprocess.run([HEADPOND, "why", str(started.run_dir), "--json"], capture_output=True, env=started.env)
        return json.loads(said.stdout)["causes"]

    log = started.run_dir / "logs" / "trainer.log"
    said = "the trainer ended with exit code 0; `headpond up` does not start it again"
    wait_until(lambda: f"{said}. {log} says: no data left" in causes(), what="the trainer's end in why")
    up.send_signal(signal.SIGINT)
    up.send_signal(signal.SIGINT)
    _, err = up.communicate(timeout=HANG_S)
    assert re.search("action=ended process=trainer .*exit code 0; .*not started again", err)
    assert not any(said in cause for cause in causes()), "nothing runs any more"


def test_a_run_directory_that_cannot_be_made_is_named(started: Started) -> None:
    started.write(RUN.replace("runs/test", "run.toml/x"))
    up = started.start()
    _, err = up.communicate(timeout=HANG_S)
    assert up.returncode == 2
    directory = started.directory / "run.toml" / "x"
    assert re.search(rf"^headpond: .*{directory} .*\(Not a directory\).* run_dir", err, re.MULTILINE)
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_same_command_resumes_and_a_finished_run_leaves_no_redis(started: Started) -> None:
    first = started.start()
    started.wait_step()
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=HANG_S)
    assert first.returncode == 0, err
    assert "stopped before its last step" in out
    before = started.status()
    assert (started.run_dir / "redis").exists()
    steps = before.step + 2
    second = started.start("--steps", str(steps), "--json")
    out, err = second.communicate(timeout=HANG_S)
    assert second.returncode == 0, err
    ended = json.loads(out)
    assert (ended["run"], ended["step"], ended["phase"]) == (before.run, steps, "done")
    assert ended["audit"]["balanced"]
    assert set(ended["restarts"].values()) == {0}
    assert not (started.run_dir / "redis").exists()
    started.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["SIGKILL", "twice"])
def test_nothing_is_left_when_it_is_killed_or_stopped_at_once(started: Started, ending: str) -> None:
    started.write(RUN + HELD)
    up = started.start()
    wait_until(lambda: started.status().states.get("running"), what="running rollouts")
    if ending == "SIGKILL":
        up.kill()
    else:
        up.send_signal(signal.SIGINT)
        wait_until(lambda: started.status().phase == "draining", what="draining")
        up.send_signal(signal.SIGINT)
        assert up.wait(HANG_S) == 0
    started.assert_clean()


@pytest.mark.slow
def test_a_process_that_never_gets_ready_ends_it_with_its_log(started: Started) -> None:
    started.write(RUN.replace("headpond engine --port {port}", "cat /no/such/model"))
    up = started.start()
    _, err = up.communicate(timeout=HANG_S)
    assert up.returncode == 2
    assert len(re.findall("action=died process=engine .*exit code 1; .*started again in", err)) == 4
    assert re.search("^headpond: the engine ended with exit code 1, 5 times", err, re.MULTILINE)
    assert "/no/such/model: No such file or directory" in err.rpartition("headpond: ")[2]
    started.assert_clean()


@pytest.mark.slow
def test_an_environment_that_cannot_be_loaded_ends_it_with_the_reason(started: Started) -> None:
    started.write(RUN + '[environments.mine]\nuse = "no_such_module:Class"\n')
    up = started.start()
    _, err = up.communicate(timeout=HANG_S)
    assert up.returncode == 2
    assert "no_such_module" in err.rpartition("headpond: ")[2]
    assert "Traceback" not in err.rpartition("headpond: ")[2]
    started.assert_clean()


@pytest.mark.slow
def test_a_refusal_of_the_orchestrator_ends_it_with_the_same_words(started: Started) -> None:
    started.write(RUN + HELD + "[recovery]\nstall_s = 3\n")
    up = started.start()
    _, err = up.communicate(timeout=HANG_S)
    assert up.returncode == 2
    assert "headpond: stopped after 3 s without progress (recovery.stall_s): " in err
    started.assert_clean()


@pytest.mark.slow
def test_modules_beside_run_toml_may_have_names_of_our_folders(started: Started) -> None:
    """Users have a `tasks.py` from Celery's tutorial, and `workers`, `services` and `cli` of their own."""
    code = (ROOT / "examples" / "start" / "sums.py").read_text()
    modules = {"tasks": "tasks.py", "workers": "workers.py", "cli": "cli.py", "services.sums": "services/sums.py"}
    tables = ""
    for number, (module, path) in enumerate(modules.items()):
        (started.directory / path).parent.mkdir(exist_ok=True)
        (started.directory / path).write_text(code)
        tables += f'[environments.e{number}]\nuse = "{module}:Sums"\n'
    started.write(
        'run_dir = "runs/test"\nsteps = 2\n[engine]\ncommand = "headpond engine --port {port}"\n'
        'versions = "announced"\n[batch]\nsize = 8\n[trainer]\nmax_steps_ahead = "unlimited"\n' + tables
    )
    up = started.start()
    out, err = up.communicate(timeout=HANG_S)
    assert up.returncode == 0, out + err
    assert started.status().step == 2
    rows = (started.run_dir / "metrics.jsonl").read_text().splitlines()
    assert all(f"e{number}" in rows[0] for number in range(len(modules)))


def test_engine_and_trainer_are_started_on_free_ports_and_the_store_follows_the_umask(started: Started) -> None:
    started.write_sums(trainer="python trainer.py {run_dir}")
    up = started.start("--run-dir", "runs/test", "--json", "--workers", "2", umask=0o002)
    out, err = up.communicate(timeout=HANG_S)
    assert up.returncode == 0, err
    ended = json.loads(out)
    assert (ended["step"], ended["phase"]) == (2, "done")
    assert {"engine", "trainer", "rollouts-1", "rollouts-2"} <= ended["restarts"].keys()
    assert "step 1: " in (started.run_dir / "logs" / "trainer.log").read_text()
    files = list((started.run_dir / "store").rglob("*"))
    assert files
    assert all(path.stat().st_mode & 0o020 for path in files), "writable by the group"
    started.assert_nothing_left()


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps_and_its_trainer(started: Started) -> None:
    """A trainer that is quick to start does not read the end of the run before."""
    started.write_sums(trainer="sh trainer.sh {run_dir}", more="max_steps_ahead = 0\n")
    (started.directory / "trainer.sh").write_text(
        f"grep -qs '\"ended\":true' $1/trainer/run.json || exec {sys.executable} trainer.py $1\n"
    )
    for steps in (1, 2, 2):
        up = started.start("--run-dir", "runs/test", "--steps", str(steps), "--json")
        out, err = up.communicate(timeout=HANG_S)
        assert up.returncode == 0, err
        ended = json.loads(out)
        assert (ended["step"], ended["phase"]) == (steps, "done")
    trained = [line.split(":")[0] for line in (started.run_dir / "logs" / "trainer.log").read_text().splitlines()]
    assert trained == ["step 0", "step 1"]
    started.assert_nothing_left()


@pytest.mark.slow
def test_other_hosts_join_with_workers_only(started: Started) -> None:
    up = started.start()
    started.wait_step()
    redis = json.loads((started.run_dir / "run.json").read_text())["redis"]
    joined = started.start("--join", redis, "--run-dir", str(started.run_dir / "other_host"))
    log = started.run_dir / "other_host" / "logs" / "rollouts.log"
    wait_until(lambda: log.exists() and "headpond.rollouts.run" in log.read_text(), what="a rollout on the other host")
    assert {path.name for path in log.parent.iterdir()} == {"compute.log", "rollouts.log", "sessions.log"}
    for each in (joined, up):
        each.send_signal(signal.SIGTERM)
        each.communicate(timeout=HANG_S)
        assert each.returncode == 0
    started.assert_clean()


def test_two_of_them_do_not_share_a_run_directory(started: Started) -> None:
    started.run_dir.mkdir(parents=True)
    lock = started.run_dir / "up.lock"
    with subprocess.Popen(["flock", str(lock), "cat"], stdin=subprocess.PIPE) as holder:
        wait_until(lock.exists)
        up = started.start()
        _, err = up.communicate(timeout=HANG_S)
        assert up.returncode == 2
        assert f"headpond: another `headpond up` runs in {started.run_dir}" in err
        holder.communicate()
