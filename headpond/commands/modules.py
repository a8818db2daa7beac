"""Where the modules of a run are found: beside its configuration, and where the command was typed."""

import sys
from pathlib import Path

# Files that `init` and `demo` write or run. In a clone they are links to `examples/`.
TEMPLATES = Path(__file__).parents[1] / "templates"


def module_directories(config: Path | None) -> list[str]:
    own = [config.resolve().parent] if config else []
    return list(dict.fromkeys(map(str, [*own, Path.cwd()])))


def find_modules(config: Path | None) -> None:
    """Make them importable in this process, as `headpond up` does for those that it starts."""
    sys.path[:0] = [directory for directory in module_directories(config) if directory not in sys.path]
