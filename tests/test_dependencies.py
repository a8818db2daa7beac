"""Every command starts with the packages of the extras `app` and `flower`, which are all that the image has."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
# What the containers' commands import, and what they load by name only.
COMMANDS = (
    "headpond.workers.rollouts headpond.workers.compute headpond.commands.main headpond.orchestrator.start "
    "headpond.demo.scripted_engine.http_server headpond.commands.live"
)
BY_NAME = "kombu.transport.redis flower.command uvloop redis.asyncio"
IMPORTED = """
import importlib, json, sys
refused = set(json.loads(sys.argv[1]))

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is not installed with the extra app", name=name)

sys.meta_path.insert(0, Refusing())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


LOADED = """
import sys
import headpond.orchestrator.start, headpond.inspection.audit, headpond.inspection.status
rooms = "headpond.environments", "headpond.engines.http", "headpond.engines.responses", "headpond.playing"
print(*(name for name in sys.modules if name.startswith(rooms)))
"""


def test_an_orchestrator_loads_neither_environments_nor_what_reads_an_engines_responses() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def installed_for(requirements: Iterable[str], extras: Iterable[str], installed: set[str]) -> set[str]:
    """The distributions that pip would install."""
    for line in requirements:
        needed = Requirement(line)
        wanted = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        name = canonical(needed.name)
        if wanted and f"{name}{needed.extras}" not in installed:
            installed |= {name, f"{name}{needed.extras}"}
            installed_for(metadata.requires(name) or [], needed.extras, installed)
    return installed


def test_every_command_starts_with_what_the_extra_app_installs() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    allowed = installed_for(project["dependencies"] + extras["app"] + extras["flower"], [], {"headpond"})
    providers = {
        name: {canonical(each) for each in distributions}
        for name, distributions in metadata.packages_distributions().items()
    }
    refused = [name for name, distributions in providers.items() if not distributions & allowed]
    assert {"pytest", "hypothesis"} <= set(refused)
    command = [sys.executable, "-c", IMPORTED, json.dumps(refused), *COMMANDS.split(), *BY_NAME.split()]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
