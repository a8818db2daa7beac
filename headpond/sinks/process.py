"""The process that sends the steps of a run to W&B, TensorBoard and trackio: follows metrics.jsonl until stdin ends.

`python -m headpond.sinks.process RUN_DIR RUN PROJECT NAME SINK...`. `sinks.json` in the run
directory has the last step that each sink was given, so that a resumed run sends none twice.
"""

import json
import math
import os
import select
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

POLL_S = 2.0
POSITIONS = "sinks.json"
# sink -> the package that it needs
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio"}


@dataclass(frozen=True, kw_only=True)
class Target:
    run_dir: Path
    run: str
    project: str
    name: str
    settings: dict[str, Any]


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Wandb:
    def __init__(self, target: Target) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run: Any = wandb.init(
            project=target.project, name=target.name, id=target.run, resume="allow", dir=str(target.run_dir),
            config=target.settings,
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    def __init__(self, target: Target) -> None:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        self._writer: Any = SummaryWriter(logdir=str(target.run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step, walltime=values.get("time"))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Trackio:
    def __init__(self, target: Target) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio: Any = trackio
        trackio.init(project=target.project, name=target.name, config=target.settings, resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


OPENERS = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio}


class Follower:
    def __init__(self, run_dir: Path, sinks: Mapping[str, Sink]) -> None:
        self._file, self._positions = run_dir / "metrics.jsonl", run_dir / POSITIONS
        self._sinks = sinks
        self._open: BinaryIO | None = None  # metrics.jsonl, at the end of what was read
        self._begun = False
        try:
            self._sent: dict[str, int] = json.loads(self._positions.read_bytes())
        except (OSError, ValueError):
            self._sent = {}

    def forward(self) -> None:
        """Send what was appended."""
        changed = False
        for step, values in self._lines():
            for name, sink in self._sinks.items():
                if step > self._sent.get(name, -1):
                    sink.log(step, values)
                    self._sent[name], changed = step, True
        if changed:
            temporary = self._positions.with_name(f".{POSITIONS}.new")
            temporary.write_text(json.dumps(self._sent))
            temporary.replace(self._positions)

    def _lines(self) -> Iterator[tuple[int, dict[str, float]]]:
        """A full file is renamed and another begins: the rest of the full one, which stays open, comes first. It is
        read after the rename was seen, when nothing is appended any more. Files that were renamed while nothing was
        sent come before."""
        if not self._begun:
            self._begun = True
            for file in self._unsent_older():
                with file:
                    yield from _appended(file)
        if self._open:
            replaced = self._is_replaced(self._open)
            yield from _appended(self._open)
            if replaced:
                self._open.close()
                self._open = None
        if self._open is None and self._file.exists():
            self._open = self._file.open("rb")
            yield from _appended(self._open)

    def _unsent_older(self) -> list[BinaryIO]:
        """The renamed files that have steps which a sink was not given, the oldest first. Opens metrics.jsonl before
        them: what is renamed meanwhile is open already."""
        wanted = 1 + min((self._sent.get(name, -1) for name in self._sinks), default=-1)
        self._open = self._file.open("rb") if self._file.exists() else None
        first, older = _first_step(self._open), list[BinaryIO]()
        for path in sorted(self._file.parent.glob("metrics.[0-9].jsonl")):  # a killed orchestrator may leave a gap
            if first <= wanted:
                break
            file = path.open("rb")
            if self._open and os.path.samestat(os.fstat(file.fileno()), os.fstat(self._open.fileno())):
                file.close()
            else:
                older.insert(0, file)
                first = _first_step(file)
        return older

    def _is_replaced(self, file: BinaryIO) -> bool:
        return self._file.exists() and not os.path.samestat(self._file.stat(), os.fstat(file.fileno()))


def _first_step(file: BinaryIO | None) -> float:
    """Infinite, if there is none yet."""
    line = file.readline() if file else b""
    if file:
        file.seek(0)
    return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf


def _appended(file: BinaryIO) -> Iterator[tuple[int, dict[str, float]]]:
    """The complete lines behind the file's position, which is moved behind them."""
    begin = file.tell()
    content = file.read()
    end = content.rfind(b"\n") + 1
    file.seek(begin + end)
    for line in content[:end].splitlines():
        values = json.loads(line)
        yield int(values.pop("step")), values


def main(arguments: list[str]) -> None:
    directory, run, project, name, *wanted = arguments
    run_dir = Path(directory)
    recorded = json.loads((run_dir / "run.json").read_bytes())
    target = Target(run_dir=run_dir, run=run, project=project, name=name, settings=recorded.get("settings", {}))
    try:
        sinks: dict[str, Sink] = {each: OPENERS[each](target) for each in wanted}
    except ImportError as error:
        packages = " ".join(PACKAGES[each] for each in wanted)
        sys.exit(f"metrics.sinks needs {packages}: pip install {packages} ({error})")
    follower = Follower(run_dir, sinks)
    while True:
        ended = bool(select.select([sys.stdin], [], [], POLL_S)[0]) and not os.read(sys.stdin.fileno(), 1)
        follower.forward()
        if ended:
            for sink in sinks.values():
                sink.close()
            return


if __name__ == "__main__":
    main(sys.argv[1:])
