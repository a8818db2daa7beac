"""Where the modules of a run are found: beside its configuration, and where the command was typed."""

import sys
from pathlib import Path

TEMPLATES = Path(__file__).parents[1] / "templates"
"""What `init` and `demo` write or run; in a clone, links to files of `examples/`."""


def module_directories(config: Path | None) -> list[str]:
    own = [config.resolve().parent] if config else []
    return list(dict.fromkeys(map(str, [*own, Path.cwd()])))


def find_modules(config: Path | None) -> None:
    """Make them importable in this process, as `headpond up` does for those that it starts."""
    sys.path[:0] = [directory for directory in module_directories(config) if directory not in sys.path]
