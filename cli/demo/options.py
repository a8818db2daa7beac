"""Options of a demo, its run directory and its configuration file."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
GROUP_SIZE = 8  # of examples/demo.toml
RUNS = Path("runs")
OFF = "off"


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    layers: int
    topk: int

    @classmethod
    def parse(cls, text: str) -> "ExpertsShape | None":
        """`8x8`, or None for `off`."""
        if text == OFF:
            return None
        match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,2})", text)
        if match is None:
            raise ConfigError(f"--routed-experts {text}: write LAYERSxTOPK, such as 8x8, or {OFF}")
        return cls(layers=int(match[1]), topk=int(match[2]))


@dataclass(frozen=True, kw_only=True)
class Options:
    run_dir: Path
    """absolute; exists and is empty"""
    steps: int
    rollouts_per_step: int
    experts: ExpertsShape | None
    keep: bool
    seconds: float | None
    """time limit of the run"""

    @property
    def config(self) -> Path:
        return self.run_dir / "demo.toml"

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"


def checked_rollouts_per_step(count: int) -> int:
    if count % GROUP_SIZE:
        raise ConfigError(f"--rollouts-per-step {count}: must be a multiple of {GROUP_SIZE}, the group size")
    return count


def write_configuration(options: Options) -> None:
    """Write examples/demo.toml with the values of the options, without addresses: those end with the demo."""
    text = (EXAMPLES / "demo.toml").read_text()
    if options.experts:
        text = text.replace("--layers 8 --topk 8", f"--layers {options.experts.layers} --topk {options.experts.topk}")
    text = text.replace("=examples/demo.toml", f"={options.config}").replace(" runs/demo\n", f" {options.run_dir}\n")
    values = {
        "run_dir": str(options.run_dir),
        "steps": options.steps,
        "size": options.rollouts_per_step // GROUP_SIZE,
        "routed_experts": options.experts is not None,
    }
    for key, value in values.items():
        line = f"{key} = {json.dumps(value)}"
        text = re.sub(rf"^{key} = \S+", lambda _, line=line: line, text, flags=re.MULTILINE)
    options.config.write_text(text)


def make_run_dir(path: Path | None) -> Path:
    """Create the given directory, which must be new or empty, or by default the next `runs/demo-N`."""
    try:
        if path is None:
            return _next_run_dir()
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"{path} is not empty: pass a new directory to --run-dir, or omit it")
    except OSError as error:
        directory = path or RUNS
        raise ConfigError(
            f"cannot create {directory} ({error.strerror}): pass another directory to --run-dir"
        ) from error
    return path.resolve()


def _next_run_dir() -> Path:
    """Demos that start at the same time get different directories."""
    RUNS.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        directory = RUNS / f"demo-{number}"
        try:
            directory.mkdir()
        except FileExistsError:
            number += 1
        else:
            return directory.resolve()


def short(path: Path) -> Path:
    """Relative to the working directory, where possible."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
