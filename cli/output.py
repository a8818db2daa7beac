"""How a command prints: with colours on a terminal, in plain lines elsewhere, as JSON where asked."""

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.facts import Fact

if TYPE_CHECKING:
    from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")]
LABEL_WIDTH = 10
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def on_terminal() -> bool:
    return sys.stdout.isatty()


def print_json(content: Mapping[str, Any]) -> None:
    import orjson

    print(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())


def print_facts(facts: Iterable[Fact]) -> None:
    if on_terminal():
        from rich.console import Console

        Console(highlight=False).print(table(facts))
        return
    for label, text, _ in facts:
        print(f"{label:<{LABEL_WIDTH}} {text}".rstrip())


def table(facts: Iterable[Fact]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text, alarm in facts:
        grid.add_row(label, Text(text, style="bold yellow" if alarm else ""))
    return grid
