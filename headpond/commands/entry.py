"""Entry point of the command `headpond`: names the extra that brings a missing package."""

import re
import sys


def main() -> None:
    try:
        from headpond.commands.main import main as run

        run()
    except ModuleNotFoundError as error:
        if (extra := _extra_of((error.name or "").partition(".")[0])) is None:
            raise
        sys.exit(f"headpond: the package {error.name} is missing: pip install 'headpond[{extra}]'")


def _extra_of(package: str) -> str | None:
    from importlib import metadata  # slow, and needed for the error alone

    for requirement in metadata.requires("headpond") or []:
        name = re.match(r"([\w.-]+)[<>=!~; ]", requirement)  # not `headpond[tokenizers]`
        extra = re.search(r"extra == .(\w+)", requirement)
        if name and extra and name[1] == package.replace("_", "-"):
            return extra[1]
    return None
