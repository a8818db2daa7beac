"""What the settings declare: which processes read them, which are fixed for a run, which belong to one host."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic_core import to_json, to_jsonable_python

from headpond.config.run import RunConfig
from headpond.declarations.sections import NOTHING, Declared, Reader, Section, declarations

SECRET = re.compile(r"(^|[_.])(key|secret|password|passwd|token|credentials?)$", re.IGNORECASE)
"""Names of options whose values are stored and shown as a digest only."""


class Setting(NamedTuple):
    key: str
    """Dotted; entries of tables have keys of their own, e.g. `environments.sums.options.digits`."""
    value: Any
    """The value as JSON."""
    declared: Declared


class Change(NamedTuple):
    key: str
    was: Any
    now: Any
    """None where the setting is not set."""
    declared: Declared

    def __str__(self) -> str:
        was, now = ("unset" if value is None else repr(value) for value in (self.was, self.now))
        return f"{self.key} was {was}, now {now}"


def shared_settings(config: RunConfig) -> list[Setting]:
    """The settings that the hosts of a run share: without paths, addresses, secrets and sizes of one process."""
    return [setting for setting in _walk(config, "", NOTHING) if not setting.declared.of_host]


def settings_used_by(config: RunConfig, reader: Reader | str) -> dict[str, Any]:
    """The shared settings that this kind of process reads, as JSON values: a run's processes agree on them."""
    return {key: value for key, value, declared in shared_settings(config) if Reader(reader) in declared.read_by}


def changes(old: Mapping[str, Any], config: RunConfig) -> list[Change]:
    """The shared settings that have another value than in `old`, which an earlier start recorded. A setting that is new
    and has its default has not changed."""
    values = {setting.key: setting.value for setting in shared_settings(config)}
    defaults = {setting.key: setting.value for setting in shared_settings(RunConfig())}
    return [
        Change(key, old.get(key), values.get(key), declared)
        for key in sorted(old.keys() | values.keys())
        if old.get(key, defaults.get(key)) != values.get(key) and (declared := _declared(key))
    ]


def _declared(key: str) -> Declared | None:
    """What the setting, or the table that it is an entry of, declares; None if this release has no such setting."""
    for name, declared in declarations(RunConfig):
        pattern = re.escape(name).replace("NAME", r"[^.]+")
        if re.fullmatch(rf"{pattern}(\..+)?", key):
            return declared
    return None


def _walk(section: Section, prefix: str, outer: Declared) -> Iterator[Setting]:
    for name, field in type(section).model_fields.items():
        declared = outer.then([section.declared, *field.metadata])
        yield from _entry(prefix + name, getattr(section, name), declared)


def _entry(key: str, value: object, declared: Declared, *, free: bool = False) -> Iterator[Setting]:
    """`free`: the entry of a table whose keys are not Headpond's."""
    if isinstance(value, Section):
        yield from _walk(value, f"{key}.", declared)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _entry(f"{key}.{name}", each, declared, free=True)
    else:
        hidden = free and value is not None and SECRET.search(key)
        yield Setting(key, _digest(value) if hidden else to_jsonable_python(value), declared)


def _digest(value: object) -> str:
    return f"sha256:{hashlib.sha256(to_json(value)).hexdigest()[:16]}"
