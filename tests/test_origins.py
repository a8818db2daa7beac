"""docs/origins.md names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "origins.md").read_text())))


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_every_named_test_exists(file: str, test: str) -> None:
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)
