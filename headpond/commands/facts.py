"""Lines of label and text that describe a run, shared by the live view and the commands."""

import unicodedata
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from headpond.records.status import Status

WORKERS_SHOWN = 8
REPLICAS_SHOWN = 16
MINUTE_S, HOUR_S = 60, 3600


class Fact(NamedTuple):
    label: str
    text: str
    alarm: bool = False  # highlighted on a terminal


def printable(text: str) -> str:
    """Control characters, marks that turn text around and halves of surrogates by their numbers, as on the dashboard:
    an error may have text of a model."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    is_space = char in "\n\t" or unicodedata.category(char) == "Zs"  # Python calls only " " printable
    return char if char.isprintable() or is_space else f"⟨U+{ord(char):04X}⟩"


def progress(status: "Status") -> Iterator[Fact]:
    """Progress in a status. Lines whose numbers are unknown are omitted."""
    if status.steps:
        yield Fact("steps", f"{status.step:,} of {status.steps:,} delivered")
    if not (rollouts := status.rollouts):
        return
    yield Fact("rollouts", equation(rollouts) + (f"; {rollouts['fenced']:,} fenced" if rollouts["fenced"] else ""))
    if refused := status.replies_refused:
        yield Fact(
            "replies refused",
            f"{refused:,} named files of other jobs: forged, or of another version (see the log)",
            alarm=True,
        )
    if rollouts["in_flight"]:
        settled = {"filtered", "delivered", "trained", "dead"}
        yield Fact("in flight", listed({name: n for name, n in status.states.items() if name not in settled}))
    if rollouts["filtered"]:
        yield Fact("filtered", listed(rollouts["filtered"]))
    if status.rollouts_per_s:
        tokens = f", {status.tokens_per_s:,.0f} tokens/s" if status.tokens_per_s else ""
        yield Fact("speed", f"{status.rollouts_per_s:,.1f} rollouts/s{tokens}")
    yield from evaluations(status)


def evaluations(status: "Status") -> Iterator[Fact]:
    """The last result of each evaluation, and what is running."""
    for name, each in status.evaluations.get("names", {}).items():
        texts: list[str] = []
        if last := each["last"]:
            reward = f"reward {last['reward_mean']:.4g}" if "reward_mean" in last else "no reward"
            dead = f", {last['dead']:,} dead" if last["dead"] else ""
            first, newest = last.get("version_first", last["version"]), last.get("version_last", last["version"])
            versions = f"version {first}" if first == newest else f"versions {first} to {newest}"
            texts.append(f"{versions}: {reward}, {counted(last['rollouts'], 'rollout')}{dead}")
        if running := each["running"]:
            texts.append(
                f"version {running['version']} is running, {running['settled']:,} of {running['of']:,} rollouts"
            )
        yield Fact("evaluation", f"{name}: {'; '.join(texts) or 'none yet'}")


def equation(rollouts: Mapping[str, Any]) -> str:
    """`8 planned = 0 delivered + 0 filtered + 8 in flight + 0 dead`"""
    filtered = sum(rollouts["filtered"].values())
    return (
        f"{rollouts['planned']:,} planned = {rollouts['delivered']:,} delivered + {filtered:,} filtered"
        f" + {rollouts['in_flight']:,} in flight + {rollouts['dead']:,} dead"
    )


def workers(running: Mapping[str, int]) -> Fact:
    """Running jobs of the busiest workers."""
    if not running:
        return Fact("workers", "no running jobs")
    busiest = dict(sorted(running.items(), key=lambda item: -item[1])[:WORKERS_SHOWN])
    more = f" and {len(running) - len(busiest)} more" if len(running) > len(busiest) else ""
    return Fact("workers", f"{counted(sum(running.values()), 'job')} running: {listed(busiest)}{more}")


def replicas(status: Mapping[str, Mapping[str, Any]]) -> Iterator[Fact]:
    """What each replica of the engine does, gave and cost."""
    for url, replica in islice(status.items(), REPLICAS_SHOWN):
        parts = [f"weights {replica['weights']!r}"] if replica["weights"] is not None else []
        if "running" in replica:
            cache = f"{replica['cache_use']:.0%} of its KV cache"
            parts.append(f"{replica['running']:,} running, {replica['waiting']:,} waiting, {cache}")
        if replica.get("tokens"):
            parts.append(f"{replica['tokens']:,} tokens, {replica['tokens_per_s']:,.0f}/s a request")
        if lost := replica.get("lost_tokens"):
            parts.append(f"{lost:,} tokens lost by its failures")
        if slow := replica.get("slow_tokens"):
            parts.append(f"about {slow:,} tokens behind the fastest")
        yield Fact("engine", f"{url}: {'; '.join(parts) or 'says nothing'}", alarm=not replica["serves"])
    if len(status) > REPLICAS_SHOWN:
        yield Fact("", f"and {len(status) - REPLICAS_SHOWN} more (--json)")


def loop_lag(lag: Mapping[str, Any]) -> str:
    return f"p99 {milliseconds(lag['p99_s'])}, max {milliseconds(lag['max_s'])}"


def largest_lag(lags: Mapping[str, Mapping[str, Any]]) -> str:
    largest = {name: max(lag[name] for lag in lags.values()) for name in ("p99_s", "max_s")}
    return f"{loop_lag(largest)} (largest of {counted(len(lags), 'other process')})"


def counted(number: int, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def listed(counts: Mapping[str, int]) -> str:
    """`rollouts 12, filtering 0`"""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:,.0f} ms"


def duration(seconds: float) -> str:
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), MINUTE_S)
    if seconds < HOUR_S:
        return f"{minutes} min {s} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"
