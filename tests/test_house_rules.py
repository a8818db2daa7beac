"""Rules of the code base: sizes, plain words, no registry host, no merge marks, existing paths in the Makefile."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["headpond", "tasks", "workers", "orchestrator", "bench", "tests", "examples"]
MODULE_LINES, TEST_LINES, FUNCTION_LINES = 450, 600, 60
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TEXT = {".py", ".md", ".toml", ".yml", ".yaml"}
TEXT_NAMES = {"Makefile", "Dockerfile", ".env.example"}
BANNED = ["who-ever", "no-body", "some-body", "me-nd(s|ed|ing)?", "he-ed(s|ed|ing)?", "like-wise"]
"""hyphenated, so that this list does not match itself"""


def files() -> list[Path]:
    """All files but those in hidden directories (environments, caches) and those that are generated."""
    generated = {"headpond.egg-info", "build", "dist", "runs", "__pycache__"}
    found = (path for path in ROOT.rglob("*") if path.is_file())
    directories = ((path, path.relative_to(ROOT).parts[:-1]) for path in found)
    return [path for path, parts in directories if not any(part in generated or part[0] == "." for part in parts)]


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


def test_no_text_has_a_banned_word() -> None:
    """Plain words instead: "no process", "the caller", "repair", "read", "also"."""
    words = "|".join(BANNED).replace("-", "")
    banned = re.compile(rf"(?<![a-z])({words})(?![a-z])", re.IGNORECASE)
    texts = [path for path in files() if path.suffix in TEXT or path.name in TEXT_NAMES]
    used = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in sorted(texts)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if banned.search(line)
    ]
    assert not used, "\n".join(used)


def test_strings_name_modules_by_their_long_names() -> None:
    """`orchestrator.composer` and `headpond.orchestrator.planning.composer` are two modules: a patch would miss."""
    short = re.compile(r"""["'](tasks|workers|orchestrator)\.(\w+|\{)[\w.{}]*[:"']|-A["'], ["'](tasks|workers)\b""")
    entries = ROOT / "tests" / "workers" / "test_clone.py"  # starts `celery -A workers.rollouts`
    texts = [(path, path.read_text()) for path in MODULES if path != entries]
    named = [f"{path.relative_to(ROOT)}: {match[0]}" for path, text in texts for match in short.finditer(text)]
    assert [name for name in named if not re.search(r"\.(log|json|toml|py)[\"']", name)] == []


def test_no_file_names_a_registry() -> None:
    hosts = ["py" + "pi.org", "pythonhosted" + ".org", "npm" + "js.org", "deb." + "debian.org"]
    named = [str(path) for path in files() for host in hosts if host.encode() in path.read_bytes()]
    assert not named


def test_no_file_has_merge_marks() -> None:
    marks = [mark * 7 for mark in (b"<", b">")]
    marked = [str(path) for path in files() if any(line[:7] in marks for line in path.read_bytes().splitlines())]
    assert not marked


def test_every_path_in_the_makefile_exists() -> None:
    named = re.findall(r"\b(?:tests|docs|bench)/[\w./-]*\w", (ROOT / "Makefile").read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
