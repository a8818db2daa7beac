"""The index of `tests/support` has every module once, and the names it gives exist."""

import re
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"
ROWS = re.findall(r"^\| `([\w.]+)` \| (.+?) \| .+ \|$", (SUPPORT / "README.md").read_text(), re.MULTILINE)


def module(name: str) -> Path:
    return SUPPORT / f"{name.replace('.', '/')}.py"


def test_the_index_has_every_module_once() -> None:
    modules = [path for path in SUPPORT.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(module(name) for name, _ in ROWS) == sorted(modules)


def test_the_names_of_the_index_are_defined_in_their_modules() -> None:
    named = [(name, word) for name, gives in ROWS for word in re.findall(r"`([A-Za-z]\w*)`", gives)]
    missing = [(name, word) for name, word in named if not defines(module(name).read_text(), word)]
    assert missing == []


def defines(text: str, name: str) -> bool:
    return re.search(rf"^(?:async )?(?:def|class) {name}\b", text, re.MULTILINE) is not None
