"""Labels of an engine's weights. vLLM and SGLang keep a free text: `7` if the trainer sets it,
`7@RUN` if the run does.

A text that is not a version names the weights that the server started with (both begin with
`default`).
"""

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from headpond.errors import Upstream
from headpond.turn import VersionSpan

MAX_VERSION = 2**31 - 1
"""Versions are stored as i32."""
START_VERSION = 0
"""Version of the weights that a server started with."""
LOADING, FAILED = "loading", "failed"
LABEL = re.compile(rf"(?:({LOADING}|{FAILED}) )?([0-9]{{1,10}})(?:@([A-Za-z0-9_-]{{1,100}}))?", re.ASCII)
Version = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]


@dataclass(frozen=True)
class WeightLabel:
    text: str
    version: int = START_VERSION
    numbered: bool = False
    """Whether the text names a version. If not, nothing was loaded since the server started."""
    run: str | None = None
    """The run that loaded the weights, if it did so itself."""
    unfit: str | None = None
    """`loading` or `failed` if the weights may be of two versions at once. None of their samples
    are trained on."""

    @classmethod
    def parse(cls, text: str) -> "WeightLabel":
        match = LABEL.fullmatch(text)
        if match is None or int(match[2]) > MAX_VERSION:
            return cls(text)
        return cls(text, int(match[2]), numbered=True, run=match[3], unfit=match[1])


def label_of(version: int, run: str, *, state: str | None = None) -> str:
    return f"{state} {version}@{run}" if state else f"{version}@{run}"


class LabelSpan(msgspec.Struct):
    """An entry of `weight_versions`: tokens `[start, end)` of the completion."""

    version: str | Version
    start: int
    end: int


def read_label(stated: str | int | None) -> int | None:
    """The version that a response names; None if it names none. Upstream if its tokens cannot be trained on."""
    label = WeightLabel.parse("" if stated is None else str(stated))
    if label.unfit:
        raise Upstream(f"the engine sampled with weights that it calls {label.text!r}: they were not loaded completely")
    return label.version if label.numbered else None


def read_spans(spans: list[LabelSpan] | None) -> tuple[VersionSpan, ...]:
    """The versions that sampled a completion; empty if the response names none. `read_turn` checks their bounds."""
    versions = [read_label(span.version) for span in spans or ()]
    if all(version is None for version in versions):
        return ()
    return tuple(
        VersionSpan(version=START_VERSION if version is None else version, start=span.start, end=span.end)
        for version, span in zip(versions, spans or (), strict=True)
    )
