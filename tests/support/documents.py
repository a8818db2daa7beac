"""README and docs as data: fenced blocks, the commands in them, inline code, links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"``\s(.+?)\s``|`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PROGRAMS = ("headpond", "celery", "make", "docker-compose", "docker", "pytest", "pip", "redis-server", "vllm")


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text()

    def blocks(self, language: str) -> list[str]:
        return [body for kind, body in FENCE.findall(self.text) if kind == language]

    def inline_code(self) -> list[str]:
        return [double or single for double, single in CODE.findall(FENCE.sub("", self.text))]

    def links(self) -> list[str]:
        return LINK.findall(FENCE.sub("", self.text))

    def commands(self) -> list[list[str]]:
        """Every command of the `sh` blocks."""
        return [command for block in self.blocks("sh") for line in block.splitlines() for command in _commands(line)]

    def mentions(self) -> list[list[str]]:
        """Inline code that is a command; its arguments may be left out."""
        lines = [code for code in self.inline_code() if code.startswith(tuple(f"{name} " for name in PROGRAMS))]
        return [command for line in lines for command in _commands(line)]


def _commands(line: str) -> Iterator[list[str]]:
    words = shlex.split(line, comments=True)
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        yield words[:end]
        words = words[end + 1 :]


README = Page(ROOT / "README.md")
CONTRIBUTING = Page(ROOT / "CONTRIBUTING.md")
GUIDES = [README, CONTRIBUTING, *map(Page, sorted((ROOT / "docs").glob("*.md")))]
LOGS = [Page(path) for path in sorted((ROOT / "docs" / "log").glob("*.md"))]
"""History: names of modules, settings and commands are those of its day."""
