"""Output of a command: colours or a live view on a terminal, plain lines elsewhere, JSON with `--json`."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headpond.commands.facts import Fact, printable

if TYPE_CHECKING:
    from rich.table import Table

    from headpond.records.status import Status

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
CONFIG_HELP = "Default: the file in HEADPOND_CONFIG, or default settings."
# Gets each status of a run.
StatusCallback = Callable[["Status"], None]

LABEL_WIDTH = 10
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def on_terminal() -> bool:
    return sys.stdout.isatty()


@contextmanager
def showing_run(*, as_json: bool, more_facts: Callable[[], Iterable[Fact]] = tuple) -> Iterator[StatusCallback]:
    """Show a run while it is driven: a live view on a terminal, log lines elsewhere and with `--json`."""
    if on_terminal() and not as_json:
        from headpond.commands.live import LiveView

        with LiveView(more_facts=more_facts) as view:
            yield view.update
    else:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        yield lambda status: None


def print_json(content: Mapping[str, Any]) -> None:
    import orjson

    print(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())


def print_result(content: Mapping[str, Any], facts: Iterable[Fact], *, as_json: bool) -> None:
    """Print `content` as JSON, or the facts of it."""
    if as_json:
        print_json(content)
    else:
        print_facts(facts)


def print_facts(facts: Iterable[Fact]) -> None:
    if on_terminal():
        from rich.console import Console

        Console(highlight=False).print(table(facts))
        return
    for label, text, _ in facts:
        print(f"{label:<{LABEL_WIDTH}} {printable(text)}".rstrip())


def print_end(content: Mapping[str, Any], facts: Iterable[Fact], *, balanced: bool, as_json: bool) -> None:
    """Print the result, and exit with 1 if the run's audit is not balanced."""
    print_result(content, facts, as_json=as_json)
    if not balanced:
        raise typer.Exit(1)


def table(facts: Iterable[Fact]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text, alarm in facts:
        grid.add_row(label, Text(printable(text), style="bold yellow" if alarm else ""))
    return grid
