"""Looks up the names that a configuration uses, among built-in and custom ones."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from penstock.errors import ConfigError

T = TypeVar("T")


def extend(built_in: Mapping[str, T], custom: Mapping[str, T], *, setting: str) -> dict[str, T]:
    """Both together. A custom name that hides a built-in one is refused, since metrics use these names."""
    if hidden := sorted(built_in.keys() & custom.keys()):
        raise ConfigError(f"{setting}: {', '.join(hidden)} is built in; register the custom one under another name")
    return {**built_in, **custom}


def lookup(registry: Mapping[str, T], name: str, *, setting: str) -> T:
    if name in registry:
        return registry[name]
    near = difflib.get_close_matches(name, registry, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(sorted(registry)) or "none"
    raise ConfigError(f"{setting} = {name!r} is not known here; {hint}this process knows: {known}")
