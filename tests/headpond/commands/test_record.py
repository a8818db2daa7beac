"""`headpond record` with a real program that uses the openai package."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.session_process import HEADPOND, Script, scripted
from support.stores import directory_store
from support.upstream import Response, answer, calling, tool_call
from support.waiting import HANG_S
from typer.testing import CliRunner

from headpond.commands.main import app
from headpond.errors import ConfigError
from headpond.store import BlobRef
from headpond.store.columns import read_columns

AGENT = """
import os, sys, time
from openai import OpenAI
messages = []
for text in sys.argv[2:]:
    messages.append({"role": "user", "content": text})
    answer = OpenAI(max_retries=0).chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    messages.append(answer.choices[0].message.to_dict())
    print(answer.choices[0].message.content, flush=True)
if sys.argv[1] == "sleep":
    time.sleep(1000)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script


def command(script: Script, tmp_path: Path, *arguments: str) -> list[str]:
    engine = ["--engine", script.server.url, "--out", str(tmp_path / "out"), "--json"]
    return [HEADPOND, "record", *engine, "--", sys.executable, "-c", AGENT, *arguments]


def record(script: Script, tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    variables = {**os.environ, "HEADPOND_SESSIONS__ENGINE_WAIT_S": "0"}
    return subprocess.run(
        command(script, tmp_path, *arguments),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=variables,
        check=False,
    )


def summary_of(output: str) -> dict[str, object]:
    """With --json, standard output has nothing else."""
    return json.loads(output)


def test_a_program_is_recorded_and_its_status_is_passed_on(script: Script, tmp_path: Path) -> None:
    message = {**calling(tool_call("look", {"at": "x"})), "reasoning": "I should look"}
    script.responses["look"] = lambda request: Response(body=answer(request, message))
    ended = record(script, tmp_path, "3", "hello", "look")
    assert ended.returncode == 3, ended.stderr
    assert "answer 1 to hello" in ended.stderr
    summary = summary_of(ended.stdout)
    assert (summary["turns"], summary["samples"], summary["exit_code"], summary["refused"]) == (2, 1, 3, {})
    text = (tmp_path / "out" / "transcript.md").read_text()
    for part in ("2 turns, 1 samples, 0 breaks", "answer 1 to hello", "> I should look", '-> look({"at": "x"})'):
        assert part in text, text
    size = (tmp_path / "out" / "session.safetensors").stat().st_size
    ref = BlobRef(key="session.safetensors", size=size, checksum="")
    columns = read_columns(directory_store(tmp_path / "out"), ref, verify=False)
    assert len(columns.turns.start) == 2


def test_an_engine_that_fails_is_told(script: Script, tmp_path: Path) -> None:
    script.responses["fails"] = lambda _: Response(status=500, body=b"{}")
    ended = record(script, tmp_path, "0", "fails")
    assert ended.returncode == 1, "the program's traceback"
    assert "InternalServerError" in ended.stderr
    summary = summary_of(ended.stdout)
    assert (summary["turns"], summary["refused"], summary["files"]) == (0, {"500": 1}, [])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_what_was_said_before_ctrl_c_is_written(script: Script, tmp_path: Path, signum: signal.Signals) -> None:
    """Ctrl-C reaches the whole process group; SIGTERM is passed on."""
    process = subprocess.Popen(
        command(script, tmp_path, "sleep", "hello"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert any("answer 1 to hello" in line for line in process.stderr)
    (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
    output = process.stdout.read()
    assert process.wait(HANG_S) == (130 if signum == signal.SIGINT else 143)
    assert summary_of(output)["turns"] == 1
    assert (tmp_path / "out" / "transcript.md").exists()
    assert (tmp_path / "out" / "session.safetensors").stat().st_size


@pytest.mark.parametrize("there", ["a file", "a directory with a file"])
def test_what_is_there_is_not_overwritten(tmp_path: Path, there: str) -> None:
    out = tmp_path / "out"
    out.touch() if there == "a file" else (out.mkdir(), (out / "notes").touch())
    result = CliRunner().invoke(app, ["record", "--out", str(out), "--", sys.executable])
    assert isinstance(result.exception, ConfigError), result.exception
    assert "choose another --out" in str(result.exception)


def test_a_directory_that_cannot_be_made_is_refused_before_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    result = CliRunner().invoke(app, ["record", "--out", str(tmp_path / "file" / "out"), "--", *program])
    assert isinstance(result.exception, ConfigError), result.exception
    assert "Not a directory; choose another --out" in str(result.exception)
    assert not (tmp_path / "ran").exists()


def test_a_program_that_is_not_there_is_refused(script: Script, tmp_path: Path) -> None:
    ended = subprocess.run(
        [HEADPOND, "record", "--out", str(tmp_path / "out"), "--", "no-such-program"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (ended.returncode, "no program 'no-such-program'" in ended.stderr) == (2, True)
