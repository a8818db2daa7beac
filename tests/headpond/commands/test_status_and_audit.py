"""`headpond status` and `headpond audit`, as text and as JSON."""

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.ledgers import generated
from support.terminal import Terminal
from typer.testing import CliRunner

from headpond.batches.signals import PublishedPolicy, RankProgress, write_policy, write_progress
from headpond.commands.main import app, main
from headpond.config import RunConfig
from headpond.inspection import run_json
from headpond.ledger.archive import archive
from headpond.ledger.schema import open_for_writing
from headpond.orchestrator import run_dir
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.processes.embedded_redis import EmbeddedRedis

HEADPOND = str(Path(sys.executable).parent / "headpond")
ROOT = str(Path(__file__).parents[3])
HEAVY = {"celery", "kombu", "aiohttp", "numpy", "rich"}
ROOMS = ("headpond.orchestrator", "headpond.tasks", "headpond.workers", "headpond.servers")
MAX_MODULES = 480  # 421 with Python 3.11: Python itself, typer with pydantic, redis with asyncio


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def run(server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with eight planned rollouts and no orchestrator."""
    monkeypatch.delenv("HEADPOND_REDIS_URL", raising=False)
    config = RunConfig(run_dir=tmp_path / "run", redis_url=server.url)
    run_dir.create_directories(config)
    run_dir.begin_or_resume(config)

    async def plan() -> None:
        ledger = Ledger(config.ledger_path)
        ledger.plan(environment="noop", example=0, size=8)
        await ledger.committed()
        ledger.close()

    asyncio.run(plan())
    return config.run_dir


def output_of(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exit_code, result.output
    return result.stdout


def test_status_prints_plain_lines(run: Path, server: EmbeddedRedis) -> None:
    id = run_json.read(run)["run"]
    *lines, waits_for = output_of("status", str(run)).splitlines()
    assert re.match(r"waits for  the orchestrator is not running \(.*\): .*`headpond", waits_for)
    assert lines == [
        f"run        {id} in {run}",
        "state      stopped",
        "rollouts   8 planned = 0 delivered + 0 filtered + 8 in flight + 0 dead",
        "in flight  planned 8",
        f"redis      {server.url} is reachable",
        "queues     rollouts 0, filtering 0, advantages 0, encoding 0",
        "workers    no running jobs",
    ]


def test_status_works_without_redis(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADPOND_REDIS_URL", "redis://:hunter2@127.0.0.1:1/0")
    text = output_of("status", str(run))
    assert re.search("^redis      .*redis://127.0.0.1:1/0 ", text, re.MULTILINE)
    assert "rollouts   8 planned" in text
    assert "hunter2" not in text


def test_status_shows_what_the_last_resume_changed_and_what_to_restart(run: Path, server: EmbeddedRedis) -> None:
    for estimator, steps in [("grpo", 10), ("rloo", 11)]:
        changed = {"advantages": {"estimator": estimator}, "steps": steps}
        run_dir.begin_or_resume(RunConfig.model_validate({"run_dir": run, "redis_url": server.url, **changed}))
    first, second = [line for line in output_of("status", str(run)).splitlines() if line.startswith("changed")]
    assert re.match(r"changed    advantages.estimator: 'grpo' .* s ago, .*'rloo'; restart compute", first)
    assert re.fullmatch(r"changed    steps: 10 .* s ago, .*11", second)


def test_status_prints_the_notes_of_the_last_status(run: Path) -> None:
    note = "the store keeps 12.0 GB of delivered steps"
    process = {"host": "elsewhere", "pid": 1}
    last = {"at": 0.0, "phase": "done", "process": process, "steps": 4, "stopped_by": None, "notes": [note]}
    run_dir.write_json(run / "status.json", last)
    assert f"note       {note}\n" in output_of("status", str(run))


def test_status_prints_each_evaluation(run: Path) -> None:
    done = {"version": 10, "version_first": 10, "version_last": 11, "rollouts": 63, "dead": 1, "reward_mean": 0.53125}
    names = {
        "held_out": {"last": done, "running": {"version": 20, "settled": 12, "of": 64}},
        "hard": {"last": None, "running": None},
    }
    process = {"host": "elsewhere", "pid": 1}
    last = {"at": 0.0, "phase": "done", "process": process, "steps": 4, "stopped_by": None, "notes": []}
    run_dir.write_json(run / "status.json", last | {"evaluations": {"names": names}})
    shown = output_of("status", str(run))
    assert re.search("held_out: .*10 to 11: .*0.5312, 63 rollouts, 1 dead; version 20 .*12 of 64", shown)
    assert "hard: none" in shown


@pytest.mark.parametrize("command", ["status", "why"])
def test_a_models_text_in_an_error_is_shown_as_text(run: Path, command: str) -> None:
    hostile = [
        "\x1b[2J",
        "\x1b]0;title\x07",
        "\u202egnirts",
    ]  # clears the screen, names the window, turns the line
    process = {"host": "elsewhere", "pid": 1}
    last = {"at": 0.0, "phase": "done", "process": process, "steps": 4, "stopped_by": None, "notes": ["".join(hostile)]}
    run_dir.write_json(run / "status.json", last)
    plain = output_of(command, str(run))
    with Terminal(HEADPOND, command, str(run), env=dict(os.environ)) as terminal:
        assert terminal.wait() == 0
    for shown in (plain, terminal.raw):
        assert "⟨U+001B⟩[2J⟨U+001B⟩]0;title⟨U+0007⟩⟨U+202E⟩gnirts" in shown
        assert [part for part in hostile if part in shown] == []


def test_why_says_how_long_ago_the_trainer_wrote_its_last_signal(run: Path) -> None:
    assert "trainer" not in output_of("why", str(run))
    write_progress(run, RankProgress(data_rank=0, data_ranks=1, epoch=1, resume_step=0, acked=-1))
    assert re.search("^trainer    .*no step; ", output_of("why", str(run)), re.MULTILINE)
    write_progress(run, RankProgress(data_rank=0, data_ranks=1, epoch=1, resume_step=0, acked=22))
    write_policy(run, PublishedPolicy(version=22, weights=None))
    for path, age_s in {"rank_00.json": 7200.0, "policy.json": 7500.0, "run.json": 0.0}.items():
        (run / "trainer" / path).touch()
        at = time.time() - age_s
        os.utime(run / "trainer" / path, (at, at))
    assert re.search("acknowledged step 22 .*version 22; .*2 h 0 min ago", output_of("why", str(run)))


def test_the_redis_that_ended_with_a_stopped_run_is_no_alarm(run: Path) -> None:
    identity = json.loads((run / "run.json").read_text())
    run_dir.write_json(run / "run.json", identity | {"redis": "redis://127.0.0.1:1/0"})
    assert "127.0.0.1:1/0 cannot be used" in output_of("status", str(run))
    (run / "redis").mkdir()
    said = output_of("status", str(run))
    assert re.search("^redis      redis://127.0.0.1:1/0 .*`headpond up`", said, re.MULTILINE)
    assert "cannot be used" not in said


def test_why_of_a_rollout_shows_the_failure_of_its_policy(run: Path) -> None:
    path, error = RunConfig(run_dir=run).ledger_path, "timeout: the rollout took longer than 5 s"

    async def play() -> str:
        ledger = Ledger(path)
        group = generated(ledger, 1, policy_error=error)
        await ledger.committed()
        ledger.close()
        return group.rollouts[0].id

    rollout = asyncio.run(play())
    assert f"policy     {error}\n" in output_of("why", str(run), rollout)
    with closing(open_for_writing(path)) as connection:
        connection.execute("BEGIN")
        connection.execute("UPDATE groups SET state = 'closed'")
        archive(connection, at_most=10, now=1.0)
        connection.execute("COMMIT")
    assert f"policy     {error}\n" in output_of("why", str(run), rollout)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM histories")
    shown = output_of("why", str(run), rollout)
    assert re.search(r"^policy     .*\(trainer\.keep_events_steps\)$", shown, re.MULTILINE)


def test_status_prints_one_json_object(run: Path) -> None:
    result = json.loads(output_of("status", str(run), "--json"))
    assert set(result) == {
        "run", "run_dir", "state", "status_age_s", "phase", "stopped_by", "process", "running_s", "step", "steps",
        "rollouts", "states", "rollouts_per_s", "tokens_per_s", "queued", "workers", "event_loop_lag", "http", "redis",
        "ledger", "waiting_for", "changed_settings", "notes", "excluded_workers", "silent_workers",
        "evaluations", "losses", "next_step",
        "replicas", "present_workers", "deaths", "asked",
    }  # fmt: skip
    assert result["state"] == "stopped"
    assert result["rollouts"]["in_flight"] == 8


def test_status_imports_what_it_shows_and_no_more(run: Path) -> None:
    """Nearly all of its time is imports: the settings, numpy and Celery would triple it."""
    script = (
        "import sys; sys.argv[1:] = ['status', sys.argv[1]]\nfrom headpond.commands.main import main\ntry: main()\n"
    )
    script += "except SystemExit: pass\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script, str(run)], capture_output=True, text=True, check=True)
    modules = done.stderr.split()
    assert "8 planned" in done.stdout
    assert not HEAVY & {module.partition(".")[0] for module in modules}
    assert not [module for module in modules if module.startswith(ROOMS)]
    assert "headpond.config.run" not in modules, "the settings are models of pydantic"
    assert len(modules) <= MAX_MODULES


def test_status_on_a_terminal_has_colours_and_the_same_text(run: Path) -> None:
    with Terminal(HEADPOND, "status", str(run), env={"PYTHONPATH": ROOT, "PATH": "/usr/bin:/bin"}) as terminal:
        assert terminal.wait() == 0
    assert "rollouts    8 planned = 0 delivered + 0 filtered + 8 in flight + 0 dead" in terminal.text
    assert "\x1b[" in terminal.raw
    assert "{" not in terminal.text


def test_audit_prints_plain_lines(run: Path) -> None:
    assert output_of("audit", str(run)).splitlines() == [
        "planned            8",
        "delivered          0  in 0 steps",
        "filtered           0",
        "in flight          8",
        "dead               0",
        "fenced             0  late results, not counted",
        "verdict    balanced: 8 planned = 0 delivered + 0 filtered + 8 in flight + 0 dead",
    ]


def test_audit_prints_one_json_object(run: Path) -> None:
    assert json.loads(output_of("audit", str(run), "--json")) == {
        "planned": 8, "delivered": 0, "filtered": {}, "in_flight": 8, "dead": 0, "fenced": 0,
        "balanced": True, "problems": [], "steps": 0, "delivered_steps": 0, "manifests_from": 0, "files_from": 0,
        "dead_jobs": [],
    }  # fmt: skip


def test_audit_says_which_files_it_has_not_read(run: Path) -> None:
    content = {"run": run_json.read(run)["run"], "steps": 41}
    run_dir.write_json(run / "audited.json", content)
    with closing(sqlite3.connect(run / "ledger.sqlite", isolation_level=None)) as connection:
        connection.execute("UPDATE state SET content = json_set(content, '$.steps_delivered', 40) WHERE kind = 'run'")
    assert re.search("^not read   .*40 .*headpond audit --full", output_of("audit", str(run)), re.MULTILINE)
    assert "not read" not in output_of("audit", str(run), "--full")


def test_audit_fails_when_a_rollout_is_not_accounted_for(run: Path) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite", isolation_level=None)) as connection:
        connection.execute("DELETE FROM rollouts WHERE idx = 0")
        connection.execute("UPDATE jobs SET state = 'dead', error = 'no' WHERE id LIKE '%-1'")
        connection.execute("""INSERT INTO state VALUES ('dead_jobs', 'rollout', 0, '{"by_name": {"no": 1}}')""")
    text = output_of("audit", str(run), exit_code=1)
    assert re.search("^problem    .*g0000001-1 .*no job", text, re.MULTILINE)
    assert "died       1 rollout job: no" in text
    assert re.search("^problem    .*8 rollouts as planned .*7", text, re.MULTILINE)
    assert "NOT balanced, 2 problems: 8 planned = 0 delivered + 0 filtered + 7 in flight + 0 dead" in text
    assert json.loads(output_of("audit", str(run), "--json", exit_code=1))["balanced"] is False


@pytest.mark.parametrize("command", ["status", "audit"])
def test_a_directory_without_a_run_is_refused_in_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["headpond", command, str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert re.fullmatch(f"headpond: {tmp_path} .*run.json\n", capsys.readouterr().err), "one line"


def test_a_malformed_redis_url_is_refused_without_its_password(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADPOND_REDIS_URL", "redis://:hunter2/@h")
    monkeypatch.setattr("sys.argv", ["headpond", "status", str(run)])
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err
    assert error.startswith("headpond: environment, HEADPOND_REDIS_URL: ")
    assert "hunter2" not in error
