"""Findings of an examination, and the change that helps."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # works, but costs something, or could not be determined
    WRONG = "wrong"  # would kill or spoil every rollout


@dataclass(frozen=True, kw_only=True)
class Finding:
    level: Level
    what: str  # one word, the label of its line
    text: str
    fix: str = ""  # the flag or the setting to change

    @property
    def sentence(self) -> str:
        return f"{self.text}: {self.fix}" if self.fix else self.text


def ok(what: str, text: str) -> Finding:
    return Finding(level=Level.OK, what=what, text=text)


def note(what: str, text: str, fix: str = "") -> Finding:
    return Finding(level=Level.NOTE, what=what, text=text, fix=fix)


def wrong(what: str, text: str, fix: str = "") -> Finding:
    return Finding(level=Level.WRONG, what=what, text=text, fix=fix)


def problems(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level is Level.WRONG]
