"""The run directory of a demo: its configuration, and the code that this names."""

import json
import re
import shlex
import shutil
from pathlib import Path

from headpond.commands.modules import TEMPLATES
from headpond.errors import ConfigError

RUNS = Path("runs")
CODE = ("small_tasks.py", "numpy_trainer.py")


def write_configuration(run_dir: Path, *, steps: int, groups: int, seed: int, keep: bool) -> Path:
    """Write the template demo.toml with these values, and copy the code. Return the path of the configuration.

    `headpond up` resumes the run with it. `groups` are those of a step.
    """
    config = run_dir / "demo.toml"
    text = (TEMPLATES / "demo.toml").read_text()
    for key, value in {"run_dir": str(run_dir), "steps": steps, "size": groups, "seed": seed}.items():
        line = f"{key} = {json.dumps(value)}"
        text = re.sub(rf"^{key} = \S+", lambda _, line=line: line, text, flags=re.MULTILINE)
    trainer = json.dumps(shlex.quote(str(run_dir / "numpy_trainer.py")))[1:-1]
    options = f" --seed {seed} --keep-batches" if keep else f" --seed {seed}"
    text = text.replace("--model tiny-moe", f"--model tiny-moe --seed {seed}")
    text = text.replace("examples/numpy_trainer.py {run_dir}", f"{trainer} {{run_dir}}{options}")
    config.write_text(text.replace("examples/demo.toml", str(config)))
    for name in CODE:
        shutil.copyfile(TEMPLATES / name, run_dir / name)
    return config


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
