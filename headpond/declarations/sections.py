"""The base class and common types of the configuration's sections. Settings declare their
readers here, and tables of settings are recognised by type."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


COMMAS = BeforeValidator(_split)
CommaSeparated = Annotated[tuple[str, ...], COMMAS]
"""A list in TOML; one string, separated by commas, in an environment variable or a flag."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Reader(StrEnum):
    """A kind of process that reads settings."""

    ORCHESTRATOR = "orchestrator"
    ROLLOUTS = "rollouts"
    """`celery -A headpond.workers.rollouts`"""
    COMPUTE = "compute"
    """`celery -A headpond.workers.compute`"""
    SESSIONS = "sessions"
    """`headpond sessions`"""
    UP = "up"
    """`headpond up`"""
    TRAINER = "trainer"
    """The user's program. It must be started with the same value."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The processes that read a setting, and whether it may change. `Section.declared` holds for
    a whole section, `Annotated` for one setting. None leaves the declaration to the enclosing
    section."""

    read_by: tuple[Reader, ...] = ()
    """The processes that use another value only after a restart. Empty means not declared, like
    None."""
    fixed: bool | None = None
    """A run cannot be resumed with another value."""
    of_host: bool | None = None
    """Paths, addresses, secrets and sizes of one process: they may differ between the hosts of a
    run."""

    def then(self, metadata: Iterable[object]) -> "Declared":
        """Return this declaration overridden by the ones in `metadata`."""
        combined = self
        for declared in metadata:
            if isinstance(declared, Declared):
                combined = Declared(
                    read_by=declared.read_by or combined.read_by,
                    fixed=combined.fixed if declared.fixed is None else declared.fixed,
                    of_host=combined.of_host if declared.of_host is None else declared.of_host,
                )
        return combined

    @property
    def restarts(self) -> tuple[Reader, ...]:
        """List the processes to restart for another value, except the orchestrator: every resume
        starts that."""
        return tuple(reader for reader in self.read_by if reader is not Reader.ORCHESTRATOR)


def read_by(*readers: Reader) -> Declared:
    return Declared(read_by=readers)


NOTHING = Declared()
FIXED = Declared(fixed=True)
OF_HOST = Declared(of_host=True)


class Section(BaseModel):
    declared: ClassVar[Declared] = Declared()
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # A wrong value may be a password.
    )


class Table(NamedTuple):
    """A setting that is a table."""

    section: type[Section] | None
    """The section of its settings or of each entry's; None if its keys are not Headpond's."""
    by_name: bool
    """True if its keys are names, as in `[environments.NAME]`."""


def table_of(annotation: Any) -> Table | None:
    """Return the table that a setting of this type is. A union with a shorter form counts too
    (`policy.renderer`)."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return table_of(parts[0])
    if origin in (Union, UnionType):
        return next((table for part in parts if (table := table_of(part))), None)
    if origin in (dict, Mapping):
        inner = table_of(parts[1])
        return Table(inner.section if inner else None, by_name=True)
    return (
        Table(annotation, by_name=False) if isinstance(annotation, type) and issubclass(annotation, Section) else None
    )


def is_value(annotation: Any) -> bool:
    """Return whether a setting of this type can be given as a value. A type that is always a
    table cannot."""
    table = table_of(annotation)
    return table is None or table.section is None or get_origin(annotation) in (Union, UnionType)


def declarations(
    section: type[Section], prefix: str = "", outer: Declared = NOTHING, *, tables: bool = False
) -> Iterator[tuple[str, Declared]]:
    """List the name and the declaration of each setting, with `tables` also of each table of
    settings. `environments.NAME.use` stands for any environment."""
    for name, field in section.model_fields.items():
        declared = outer.then([section.declared, *field.metadata])
        if tables or is_value(field.annotation):
            yield prefix + name, declared
        if (table := table_of(field.annotation)) and table.section:
            below = f"{prefix}{name}.NAME." if table.by_name else f"{prefix}{name}."
            yield from declarations(table.section, below, declared, tables=tables)
