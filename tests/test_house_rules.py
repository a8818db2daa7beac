"""What the code base promises about itself: sizes, nothing that names a registry's host, no half-done merge."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["penstock", "tasks", "workers", "orchestrator", "services", "cli", "bench", "tests", "examples"]
MODULE_LINES, TEST_LINES, FUNCTION_LINES = 450, 600, 60
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    limit = TEST_LINES if path.is_relative_to(ROOT / "tests") else MODULE_LINES
    assert text.count("\n") <= limit, f"split {path.name} by meaning"
    long = [
        f"{node.name} (line {node.lineno}): {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES
    ]
    assert not long


def files() -> list[Path]:
    others = {".venv", ".venv-verifiers", ".git", "penstock.egg-info"}
    found = (path for path in ROOT.rglob("*") if path.is_file() and not others & set(path.parts))
    return [path for path in found if path.suffix != ".pyc"]


def test_no_file_names_a_registry() -> None:
    hosts = ["py" + "pi.org", "pythonhosted" + ".org", "npm" + "js.org", "deb." + "debian.org"]
    named = [str(path) for path in files() for host in hosts if host.encode() in path.read_bytes()]
    assert not named


def test_no_file_has_a_merge_s_marks() -> None:
    marks = [mark * 7 for mark in (b"<", b">")]
    marked = [str(path) for path in files() if any(line[:7] in marks for line in path.read_bytes().splitlines())]
    assert not marked
