"""What a demo is to do, as its options say, and the configuration that follows from them."""

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
class Routes:
    layers: int
    topk: int

    @classmethod
    def parse(cls, text: str) -> "Routes | None":
        """`8x8`, or None for `off`."""
        if text == OFF:
            return None
        found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,2})", text)
        if found is None:
            raise ConfigError(f"--routed-experts {text}: write LAYERSxTOPK, such as 8x8, or {OFF}")
        return cls(layers=int(found[1]), topk=int(found[2]))


@dataclass(frozen=True, kw_only=True)
class Options:
    run_dir: Path
    """absolute; made, and empty"""
    steps: int
    rollouts_per_step: int
    routes: Routes | None
    keep: bool
    seconds: float | None
    """after so long the run is stopped, however far it is"""

    def __post_init__(self) -> None:
        if self.rollouts_per_step % GROUP_SIZE:
            raise ConfigError(
                f"--rollouts-per-step {self.rollouts_per_step}: give a multiple of {GROUP_SIZE}, the size of a group"
            )

    @property
    def config(self) -> Path:
        return self.run_dir / "demo.toml"

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"


def write_configuration(options: Options) -> None:
    """examples/demo.toml with the options' values. Addresses are not in it: those of the demo are gone afterwards."""
    text = (EXAMPLES / "demo.toml").read_text()
    if options.routes:
        text = text.replace("--layers 8 --topk 8", f"--layers {options.routes.layers} --topk {options.routes.topk}")
    text = text.replace("=examples/demo.toml", f"={options.config}").replace(" runs/demo\n", f" {options.run_dir}\n")
    values = {
        "run_dir": str(options.run_dir),
        "steps": options.steps,
        "size": options.rollouts_per_step // GROUP_SIZE,
        "routed_experts": options.routes is not None,
    }
    for key, value in values.items():
        line = f"{key} = {json.dumps(value)}"
        text = re.sub(rf"^{key} = \S+", lambda _, line=line: line, text, flags=re.MULTILINE)
    options.config.write_text(text)


def make_run_dir(wanted: Path | None) -> Path:
    """The directory that the user named, if nothing is in it; else the next `runs/demo-N`."""
    try:
        if wanted is None:
            return _next_run_dir()
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise ConfigError(f"{wanted} is not empty: give the demo a new directory, or leave --run-dir out")
    except OSError as error:
        directory = wanted or RUNS
        raise ConfigError(f"cannot make {directory} ({error.strerror}): choose another place by --run-dir") from error
    return wanted.resolve()


def _next_run_dir() -> Path:
    """Demos that start at the same moment get different ones."""
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
    """As a user would type it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
