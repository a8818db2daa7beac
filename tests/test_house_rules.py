"""What the code base promises about itself: sizes, and nothing that names a registry's host."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["penstock", "tasks", "workers", "orchestrator", "services", "cli", "bench", "tests", "examples"]
MODULE_LINES, TEST_LINES, FUNCTION_LINES = 300, 500, 40
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


def test_no_file_names_a_registry() -> None:
    hosts = ["py" + "pi.org", "pythonhosted" + ".org", "npm" + "js.org", "deb." + "debian.org"]
    others = {".venv", ".venv-verifiers", ".git"}
    files = [path for path in ROOT.rglob("*") if path.is_file() and not others & set(path.parts)]
    named = [
        str(path) for path in files for host in hosts if path.suffix != ".pyc" and host.encode() in path.read_bytes()
    ]
    assert not named
