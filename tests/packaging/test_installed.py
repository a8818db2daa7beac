"""The wheel in empty environments, installed with pip and with uv: `make test-wheel`."""

import json
import os
import re
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

import pytest
from support.engine_process import EngineProcess
from support.processes import free_port
from support.waiting import HANG_S, wait_until
from support.wheels import COMMIT, ROOT, build, copy_tree

from headpond.version import WRITTEN

pytestmark = pytest.mark.slow

SMALL = ("--steps", "2", "--rollouts-per-step", "24", "--json")
CONSTRAINTS = ROOT / "constraints" / "app.txt"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    (tree / "headpond" / WRITTEN).write_text(COMMIT)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build(tree, tree.parent / "wheel")[0]


def without_ours(variables: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith(("HEADPOND", "PYTHON"))} | variables


def run(*command: str | Path, cwd: Path, expected: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = without_ours(variables)
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == expected, done.stdout + done.stderr
    return done


def installed(directory: Path, *requirements: str) -> Path:
    """The `bin` of a new environment."""
    venv.create(directory, with_pip=True)
    pip = [directory / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    run(*pip, "--constraint", CONSTRAINTS, *requirements, cwd=directory)
    return directory / "bin"


def assert_learned(output: str) -> None:
    summary = json.loads(output)
    assert (summary["ended"], summary["delivered_steps"], summary["trained_steps"]) == ("done", 2, 2)
    assert summary["audit"]["balanced"]


@pytest.fixture(scope="module")
def bin_dir(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("pip") / "venv", f"{wheel}[app,local,flower]")


def test_pip_and_an_empty_folder_are_all_that_the_demo_needs(bin_dir: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert COMMIT[:12] in run(bin_dir / "headpond", "--version", cwd=empty).stdout
    assert_learned(run(bin_dir / "headpond", "demo", *SMALL, cwd=empty).stdout)
    run(bin_dir / "headpond", "init", "mine", cwd=empty)
    engine = EngineProcess(tmp_path)
    try:
        host, port = engine.address
        urls = {"HEADPOND_ENGINE__URLS": f"http://{host}:{port}", "HEADPOND_STEPS": "1", "HEADPOND_BATCH__SIZE": "2"}
        run(bin_dir / "headpond", "try", "run.toml", cwd=empty / "mine", **urls)
        run(bin_dir / "headpond", "up", "run.toml", cwd=empty / "mine", **urls)
    finally:
        engine.end()
    status = json.loads(run(bin_dir / "headpond", "status", "runs/first", "--json", cwd=empty / "mine").stdout)
    assert status["step"] == 1


def test_flower_starts_from_the_wheel(bin_dir: Path, tmp_path: Path) -> None:
    redis, flower = free_port(), free_port()
    environment = without_ours({"HEADPOND_REDIS_URL": f"redis://127.0.0.1:{redis}/0"})
    commands = (
        f"{bin_dir}/headpond redis --port {redis}",
        f"{bin_dir}/celery -A headpond.tasks flower --address=127.0.0.1 --port={flower}",
    )
    processes = [subprocess.Popen(command.split(), cwd=tmp_path, env=environment) for command in commands]

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{flower}/healthcheck", timeout=HANG_S) as response:
                return response.read() == b"OK"
        except OSError:
            return False

    try:
        wait_until(healthy, what="Flower")
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(HANG_S)


def test_a_command_without_its_extra_names_it(wheel: Path, tmp_path: Path) -> None:
    bin_dir = installed(tmp_path / "venv", f"headpond @ file://{wheel}")
    assert "pip install 'headpond[app]'" in run(bin_dir / "headpond", "demo", cwd=tmp_path, expected=1).stderr
    bin_dir = installed(tmp_path / "venv", f"headpond[app] @ file://{wheel}")
    refused = run(bin_dir / "headpond", "demo", cwd=tmp_path, expected=2, PATH=f"{bin_dir}:/bin")
    assert "pip install 'headpond[local]'" in refused.stderr


def test_uv_runs_the_wheel_and_the_clone(wheel: Path, tree: Path, tmp_path: Path) -> None:
    uv = installed(tmp_path / "venv", "uv")
    python = re.sub(r"^(\d+\.\d+).*", r"\1", sys.version, flags=re.DOTALL)
    source = f"headpond[app,local] @ {wheel.parent.name}/{wheel.name}"
    common = {"UV_PYTHON_DOWNLOADS": "never", "UV_CACHE_DIR": str(tmp_path / "cache")}
    command = [uv / "uvx", "--python", python, "--from", source, "headpond", "demo", *SMALL]
    assert_learned(run(*command, cwd=wheel.parents[1], **common).stdout)
    run(uv / "uv", "sync", "--python", python, "--extra", "app", "--extra", "local", cwd=tree, **common)
    assert COMMIT[:12] in run(uv / "uv", "run", "--no-sync", "headpond", "--version", cwd=tree, **common).stdout
