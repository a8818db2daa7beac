"""`headpond init DIR`: a configuration, an environment and a trainer to begin with."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headpond.commands.facts import Fact
from headpond.commands.modules import TEMPLATES
from headpond.commands.output import Json, print_result
from headpond.errors import ConfigError

if TYPE_CHECKING:
    from headpond.doctor.examination import Examination

START = TEMPLATES / "start"
TORCH_TRAINER = TEMPLATES / "grpo_torch.py"
FILES = ("run.toml", "sums.py", "trainer.py")
ENGINE = re.compile(r"^\[engine\]\n.*?(?=^\[)", re.MULTILINE | re.DOTALL)
SAMPLING = "[policy.sampling]\n"
TRAINER = re.compile(r"^command = \"python trainer\.py .*$", re.MULTILINE)
ANNOUNCED = 'versions = "announced"  # by trainer.py; the engine\'s own, token by token: docs/engines.md'
LOADED = 'weight_update = "headpond"  # the run loads what trainer.py publishes into the server'
PYTHON_S = 120.0  # for an interpreter on a slow disk to look for packages
LOOK = """
import importlib.util, json, os, sys
names = ("torch", "transformers", "numpy", "xxhash", "headpond")
found = {name: bool(importlib.util.find_spec(name)) for name in names}
model = sys.argv[1]
if found["transformers"] and not os.path.isdir(model):
    from huggingface_hub import snapshot_download
    model = snapshot_download(model, local_files_only=True)
print(json.dumps({"found": found, "model": model}))
"""
LEARNING_RATES = ((100e6, "5e-4"), (4e9, "1e-5"))  # up to these bytes of weights: tiny models, 2 billion parameters
LEARNING_RATE = "1e-6"  # usual for more, and safe if the size is not known
WARMUP = "10"  # steps


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write to. It is created.")],
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Write the [engine] section for this server, after examining it.")
    ] = None,
    torch: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Write a trainer for the engine's model, run by this Python with torch."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run.toml with comments, an environment and a trainer to begin with.

    Asks nothing and overwrites nothing. With an engine, its section is what `headpond doctor` finds; with --torch too,
    trainer.py trains its model (examples/grpo_torch.py) and the run loads the weights, so that rewards can rise.
    """
    if torch and not engine:
        raise ConfigError("--torch needs --engine: the model to train is the one that the server has")
    if torch and "/" in torch:  # the trainer is started in another directory
        torch = str(Path(torch).absolute())
    if taken := [name for name in FILES if (directory / name).exists()]:
        raise ConfigError(f"{directory} has a {taken[0]}: choose another directory, or remove it")
    configuration = (START / "run.toml").read_text()
    if engine:
        found = _examined(engine, loads_weights=torch is not None)
        section, weights = found.block(), found.facts[0].weights
        configuration = ENGINE.sub(lambda _: f"{section}\n{LOADED if torch else ANNOUNCED}\n\n", configuration)
        if longest := found.shorter_sequences:
            length = (
                f"[policy]\nmax_seq_len = {longest}  # the server's --max-model-len, prompt and completion together"
            )
            configuration = configuration.replace(SAMPLING, f"{length}\n\n{SAMPLING}")
        if torch:
            command = f"command = {json.dumps(_command(torch, weights))}  # --lr: by the size of the weights"
            configuration = TRAINER.sub(lambda _: command, configuration)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            source = TORCH_TRAINER if torch and name == "trainer.py" else START / name
            (directory / name).write_text(configuration if name == "run.toml" else source.read_text())
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error
    commands = [f"cd {directory}", "headpond doctor run.toml", "headpond try run.toml", "headpond up run.toml"]
    wrote = [Fact("wrote", str(directory / name)) for name in FILES]
    content = {"directory": str(directory.resolve()), "files": list(FILES), "next": commands}
    print_result(content, [*wrote, *_next(commands)], as_json=as_json)


def _next(commands: list[str]) -> list[Fact]:
    what = ["", "is the engine as it should be?", "plays three examples", "starts the run; Ctrl-C stops it"]
    texts = [f"{command:<26}{f'# {why}' if why else ''}".rstrip() for command, why in zip(commands, what, strict=True)]
    return [Fact("next" if not number else "", text) for number, text in enumerate(texts)]


def _command(python: str, weights: str | None) -> str:
    """Return the command of the trainer with torch. Raise ConfigError if it could not begin."""
    from headpond.commands.launcher.parts import RUN_DIR

    if not weights:
        raise ConfigError("the server does not say where its weights are: copy examples/grpo_torch.py, and name them")
    seen = _look(python, weights)
    clone = TEMPLATES.parents[1]
    in_clone = (clone / "pyproject.toml").exists()
    if missing := [
        name for name, there in seen["found"].items() if not there and not (name == "headpond" and in_clone)
    ]:
        raise ConfigError(f"{python} has no {', '.join(missing)}: {python} -m pip install {' '.join(missing)}")
    path = [] if seen["found"]["headpond"] else ["env", f"PYTHONPATH={clone}"]
    launcher = [*path, python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    rate = learning_rate(Path(seen["model"]))
    paths = f"{RUN_DIR} {shlex.quote(seen['model'])} {RUN_DIR}/training"
    return f"{shlex.join([*launcher, 'trainer.py'])} {paths} --lr {rate} --warmup {WARMUP}"


def learning_rate(weights: Path) -> str:
    """Choose by the size of the files in a directory of weights."""
    size = sum(path.stat().st_size for path in weights.glob("*.safetensors"))
    return next((rate for most, rate in LEARNING_RATES if 0 < size <= most), LEARNING_RATE)


def _look(python: str, weights: str) -> dict[str, Any]:
    """Which packages a Python has, and the directory of the weights."""
    try:
        done = subprocess.run(
            [python, "-c", LOOK, weights], cwd=START, capture_output=True, text=True, timeout=PYTHON_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--torch {python}: {error}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["(no output)"])[-1]
        raise ConfigError(f"--torch {python} does not find the weights {weights} on this machine: {said}")
    return json.loads(done.stdout)


def _examined(url: str, *, loads_weights: bool) -> "Examination":
    """Examine a server. Problems are printed; the files are written all the same."""
    from headpond import config
    from headpond.doctor.examination import Examination
    from headpond.event_loop import factory as event_loop

    flags = {"engine.urls": url, **({"engine.weight_update": "headpond"} if loads_weights else {})}
    examination = Examination(config.load(None, flags=flags, environ={}))
    problems = event_loop.run(_problems(examination), concurrency=8)
    if not examination.facts:
        raise ConfigError(f"the engine cannot be examined: {problems[0] if problems else url}")
    for problem in problems:
        print(f"headpond doctor: {problem}", file=sys.stderr)
    return examination


async def _problems(examination: "Examination") -> list[str]:
    from headpond.doctor.findings import Level

    return [finding.sentence async for finding in examination.findings() if finding.level is Level.WRONG]
