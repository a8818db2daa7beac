"""Refuses the variables, settings and run directories of Penstock, as Headpond was called until version 0.2.0."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headpond.errors import ConfigError

PREFIX = "PENSTOCK_"
CODE = re.compile(r"penstock\.[\w.]+:")
RENAMED = "Penstock is called Headpond since version 0.2.0"


def refuse_old_variables(environ: Mapping[str, str] = os.environ) -> None:
    if old := sorted(name for name in environ if name.startswith(PREFIX)):
        new = f"HEADPOND_{old[0].removeprefix(PREFIX)}"
        raise ConfigError(f"environment, {old[0]}: {RENAMED}: rename the variable to {new}")


def refuse_old_values(path: Path | None, values: Mapping[str, Any], section: str = "") -> None:
    """Refuse names of code in the package `penstock`, and `weight_update = "penstock"`."""
    for key, value in values.items():
        if isinstance(value, dict):
            refuse_old_values(path, value, f"{section}{key}.")
        elif isinstance(value, str) and (CODE.match(value) or (key, value) == ("weight_update", "penstock")):
            new = value.replace("penstock", "headpond")
            raise ConfigError(f"{path}: {section}{key} = {value!r}: {RENAMED}: write {new!r}")
