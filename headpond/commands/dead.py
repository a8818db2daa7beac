"""`headpond dead RUN_DIR [--retry]`: what died and why, and playing it again."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from headpond.commands import facts
from headpond.commands.facts import Fact
from headpond.commands.output import Json, print_result
from headpond.commands.status import RunDir

SHOWN = 20  # examples
NAMED = 8  # rollouts of one example that died alike


def dead(
    run_dir: RunDir,
    retry: Annotated[
        bool, typer.Option("--retry", help="Play the examples of what died, and those in quarantine, again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what died in a run and why; with --retry, put it back.

    A rollout is dead when its attempts are used up. An example is in quarantine when its rollouts die while those of
    others do not (recovery.max_example_deaths). With --retry their examples are played again, before all others, by
    the orchestrator that runs or by the next one; what died before an earlier --retry is not put back twice.
    """
    from headpond.inspection import dead as inspection

    result = inspection.retry(run_dir) if retry else inspection.dead(run_dir)
    print_result(result, _facts(result), as_json=as_json)


def _facts(result: Mapping[str, Any]) -> Iterator[Fact]:
    yield Fact("dead", facts.counted(result["dead"], "rollout"))
    for cause in result["causes"]:
        yield Fact("", f"{facts.counted(cause['jobs'], cause['kind'] + ' job')}: {cause['error']}")
    for each in result["quarantined"]:
        example = f"example {each['example']} of {each['environment']}"
        yield Fact("quarantine", f"{example} is not played again: {each['error']}", alarm=True)
    alike = _alike(result["rollouts"])
    for (environment, example, error), ids in alike[:SHOWN]:
        more = f" and {len(ids) - NAMED:,} more" if len(ids) > NAMED else ""
        yield Fact("rollouts", f"of {environment}, example {example}: {', '.join(ids[:NAMED])}{more}: {error}")
    if len(alike) > SHOWN:
        left = sum(len(ids) for _, ids in alike[SHOWN:])
        yield Fact("", f"and {facts.counted(left, 'rollout')} of other examples: --json lists them")
    if "again" in result:
        number = sum(map(len, result["again"].values()))
        listed = facts.listed({name: len(examples) for name, examples in result["again"].items()})
        text = f"{facts.counted(number, 'example')} ({listed}) to be played again first" if number else "nothing"
        done = ", when the run, which is done, is started again with more steps" if number and result["done"] else ""
        yield Fact("put back", text + done)


def _alike(rollouts: list[dict[str, Any]]) -> list[tuple[tuple[str, int, str], list[str]]]:
    """Rollouts of one example that died of the same error."""
    alike: dict[tuple[str, int, str], list[str]] = {}
    for each in rollouts:
        alike.setdefault((each["environment"], each["example"], each["error"]), []).append(each["rollout"])
    return list(alike.items())
