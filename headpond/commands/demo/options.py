"""Options of a demo, its run directory and its configuration file."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from headpond.commands.modules import TEMPLATES
from headpond.errors import ConfigError

GROUP_SIZE = 8  # of examples/demo.toml
RUNS = Path("runs")
CODE = ("small_tasks.py", "numpy_trainer.py")


@dataclass(frozen=True, kw_only=True)
class Options:
    run_dir: Path
    """absolute; exists and is empty"""
    steps: int
    rollouts_per_step: int
    seed: int
    """of the first weights, the order of examples and all that is sampled"""
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
    """Write the template demo.toml with the values of the options, and beside it the code that it names.

    It has no addresses: those end with the demo.
    """
    text = (TEMPLATES / "demo.toml").read_text()
    seed = f" --seed {options.seed}" if options.seed else ""
    text = text.replace("--model tiny-moe\n", f"--model tiny-moe{seed}\n")
    text = text.replace("=examples/demo.toml", f"={options.config}")
    text = text.replace("PYTHONPATH=examples", f"PYTHONPATH={options.run_dir}")
    text = text.replace("python examples/", f"python {options.run_dir}/")
    text = text.replace(" runs/demo\n", f" {options.run_dir}{seed}\n")
    values = {
        "run_dir": str(options.run_dir),
        "steps": options.steps,
        "size": options.rollouts_per_step // GROUP_SIZE,
        "seed": options.seed,
    }
    for key, value in values.items():
        line = f"{key} = {json.dumps(value)}"
        text = re.sub(rf"^{key} = \S+", lambda _, line=line: line, text, flags=re.MULTILINE)
    options.config.write_text(text)
    for name in CODE:
        shutil.copyfile(TEMPLATES / name, options.run_dir / name)


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
