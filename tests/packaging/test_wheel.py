"""What is in the wheel and in the source distribution, and what stays of other people's packages beside it."""

import os
import subprocess
import sys
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
from support.wheels import COMMIT, ROOT, build, copy_tree

from headpond.version import VERSION, WRITTEN

LINKS = ["headpond/tasks", "headpond/workers", "headpond/orchestrator"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """Built from a tree with a written commit."""
    (tree / "headpond" / WRITTEN).write_text(COMMIT)
    built, _ = build(tree, tree.parent / "wheel")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    directory = wheel.parent.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
    assert tops == {"headpond", f"headpond-{VERSION}.dist-info"}


def test_the_wheel_has_every_module_and_file_of_the_package_and_no_benchmark(wheel: Path) -> None:
    inside = names(wheel)
    for folder in ("headpond", "tasks", "workers", "orchestrator"):
        prefix = "" if folder == "headpond" else "headpond/"
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        missing = [path for path in files if prefix + str(path.relative_to(ROOT)) not in inside]
        assert not missing
    assert "headpond/py.typed" in inside
    assert not [name for name in inside if "bench" in name.split("/")]


def test_templates_of_the_wheel_are_the_examples(site: Path) -> None:
    templates = [path for path in (site / "headpond" / "templates").rglob("*") if path.is_file()]
    assert len(templates) == 7
    for path in templates:
        example = ROOT / "examples" / path.relative_to(site / "headpond" / "templates")
        assert path.read_bytes() == example.read_bytes()


def test_a_source_distribution_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    archive, _ = build(tree, tmp_path / "sdist", "build_sdist")
    with tarfile.open(archive) as sources:
        sources.extractall(tmp_path / "sources", filter="data")
    [unpacked] = (tmp_path / "sources").iterdir()
    assert not [link for link in LINKS if (unpacked / link).is_symlink()], "a link could point to nothing"
    assert {path.name for path in unpacked.iterdir() if path.is_dir()} == {"deploy", "headpond", "headpond.egg-info"}
    again, _ = build(unpacked, tmp_path / "again")
    assert names(again) == names(wheel)


def run(site: Path, *command: str, cwd: Path) -> str:
    """Run a command with the wheel's package in place of the clone's."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


MAIN = "from headpond.commands.entry import main; main()"


def test_the_wheels_command_knows_its_commit_and_writes_templates(site: Path, tmp_path: Path) -> None:
    version = run(site, "-c", MAIN, "--version", cwd=tmp_path)
    assert version.startswith(f"headpond {VERSION} ({COMMIT[:12]}), ")
    run(site, "-c", MAIN, "init", "mine", cwd=tmp_path)
    assert (tmp_path / "mine" / "sums.py").read_bytes() == (ROOT / "examples" / "start" / "sums.py").read_bytes()


def test_a_tree_without_git_builds_and_reports_that_its_commit_is_unknown(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    built, printed = build(tree, tmp_path / "wheel")
    assert "does not know its commit" in printed
    assert f"headpond/{WRITTEN}" not in names(built)
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path / "site")
    assert "(commit unknown)" in run(tmp_path / "site", "-c", MAIN, "--version", cwd=tmp_path)


def test_a_copy_that_lost_its_links_names_them(tree: Path, tmp_path: Path) -> None:
    copy = copy_tree(tmp_path / "copy")
    for link in LINKS:
        target = (copy / link).readlink()
        (copy / link).unlink()
        (copy / link).write_text(str(target))  # as git writes a link with core.symlinks=false
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-c", "import headpond"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert "headpond/tasks is not a folder" in done.stderr
    assert "core.symlinks=true" in done.stderr
    with pytest.raises(subprocess.CalledProcessError) as refused:
        build(copy, tmp_path / "wheel")
    assert "headpond/tasks is not a folder" in refused.value.stderr


OTHER = """
import pathlib
pathlib.Path("theirs/tasks").mkdir(parents=True)
pathlib.Path("theirs/tests").mkdir()
pathlib.Path("theirs/tasks/__init__.py").write_text("THEIRS = 1")
pathlib.Path("theirs/tests/__init__.py").write_text("THEIRS = 2")
pathlib.Path("theirs/pyproject.toml").write_text('''
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "theirs"
version = "1"
[tool.setuptools]
packages = ["tasks", "tests"]
''')
"""


@pytest.mark.parametrize("order", [("theirs", "ours"), ("ours", "theirs")])
def test_another_wheel_with_packages_of_common_names_keeps_them(
    wheel: Path, tmp_path: Path, order: tuple[str, str]
) -> None:
    subprocess.run([sys.executable, "-c", OTHER], cwd=tmp_path, check=True)
    other, _ = build(tmp_path / "theirs", tmp_path / "out")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    for one in order:
        chosen = {"ours": wheel, "theirs": other}[one]
        subprocess.run([*pip, "install", "--no-deps", "--no-index", "--no-compile", str(chosen)], check=True)
    check = "import tasks, tests; assert (tasks.THEIRS, tests.THEIRS) == (1, 2)"
    imported = textwrap.dedent(f"{check}; import headpond, headpond.version")
    subprocess.run([str(python), "-c", imported], cwd=tmp_path / "out", check=True)
    subprocess.run([*pip, "uninstall", "--yes", "headpond"], check=True)
    subprocess.run([str(python), "-c", check], cwd=tmp_path / "out", check=True)
