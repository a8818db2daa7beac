"""What a process of the same user sees of a process that keeps secrets. As root everything is seen: these tests change
the user."""

import asyncio
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from headpond.environments import AgentPolicy, agent_program, run_program
from headpond.errors import ConfigError

SECRET = "hunter2"
OTHER_USER = pwd.getpwnam("daemon")
POLICY = AgentPolicy(base_url="http://127.0.0.1:9/v1", api_key="k")
ROOT = Path(__file__).parents[3]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the user; the tests run as root in CI")

# A worker that has become another user, as if that user had started it, and an agent's program of the same user.
WORKER = """
import ctypes, os, subprocess, sys
from headpond.processes import privacy
uid, gid, steps = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
os.setgroups([]); os.setgid(gid); os.setuid(uid)
ctypes.CDLL(None).prctl(privacy.PR_SET_DUMPABLE, 1, 0, 0, 0)  # cleared by the change of the user
if "forget" in steps:
    privacy.forget_variables()
if "forbid" in steps:
    privacy.forbid_inspection()
program = f"id -u; cat /proc/{os.getpid()}/environ; echo; head -c 1 /proc/{os.getpid()}/maps && echo maps; env"
agent = subprocess.run(["/bin/sh", "-c", program], env=privacy.inherited_variables(), capture_output=True, text=True)
print(agent.stdout.replace(chr(0), chr(10)))
print("kept", os.environ["OTHER"], os.environ.get("HEADPOND_REDIS_URL"))
"""
URL = f"redis://:{SECRET}@127.0.0.1:6379/0"


def worker_as_user(steps: str) -> list[str]:
    variables = {
        "HEADPOND_REDIS_URL": URL,
        "OTHER": "HEADPOND_REDIS_URL=stays",
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
    }
    command = [sys.executable, "-c", WORKER, str(OTHER_USER.pw_uid), str(OTHER_USER.pw_gid), steps]
    worker = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert worker.returncode == 0, worker.stderr
    return worker.stdout.strip().split("\n")


@needs_root
@pytest.mark.parametrize(
    ("steps", "seen", "inspected"),
    [("", True, True), ("forget", False, True), ("forbid", False, False), ("forget,forbid", False, False)],
)
def test_an_agent_of_the_same_user_sees_no_secret(steps: str, seen: bool, inspected: bool) -> None:
    user, *lines, last = worker_as_user(steps)
    assert user == str(OTHER_USER.pw_uid)
    assert any(SECRET in line for line in lines) is seen
    assert any(line.endswith("maps") for line in lines) is inspected
    assert last == f"kept HEADPOND_REDIS_URL=stays {None if 'forget' in steps else URL}"


@needs_root
def test_the_program_of_an_agent_runs_as_another_user(tmp_path: Path) -> None:
    script = (
        f'id -u; id -G; echo "$HOME $USER"; cat /proc/{os.getpid()}/environ >/dev/null && echo read; echo > /dev/stderr'
    )
    agent_program.run_as("daemon")
    try:
        result = asyncio.run(run_program(["/bin/sh", "-c", script], POLICY, directory=Path("/")))
    finally:
        agent_program.run_as(None)
    lines = result.output.split("\n")
    assert lines[:3] == [str(OTHER_USER.pw_uid), str(OTHER_USER.pw_gid), f"{OTHER_USER.pw_dir} daemon"]
    assert "Permission denied" in result.output
    assert "read" not in lines


@needs_root
def test_a_program_of_another_user_ends_with_its_rollout() -> None:
    async def main() -> None:
        running = asyncio.create_task(run_program(["/bin/sleep", "1000"], POLICY, directory=Path("/")))
        while not (pids := _sleepers()):
            await asyncio.sleep(0.05)
        assert all(_owner(pid) == OTHER_USER.pw_uid for pid in pids)
        running.cancel()
        await asyncio.wait([running])
        assert not _sleepers()

    agent_program.run_as("daemon")
    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        agent_program.run_as(None)


def _owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def _sleepers() -> list[int]:
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes() == b"/bin/sleep\x001000\x00"]


def test_an_unknown_user_is_refused() -> None:
    with pytest.raises(ConfigError, match="this machine has no user 'absent'"):
        agent_program.run_as("absent")
