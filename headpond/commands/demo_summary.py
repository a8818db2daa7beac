"""Summary of a demo: figures read from the run directory, and the paths of its files."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headpond.batches import read_manifests, read_trainer
from headpond.batches.manifest import manifest_key
from headpond.commands import curve, facts
from headpond.commands.audit import verdict
from headpond.commands.demo_directory import short
from headpond.commands.facts import Fact
from headpond.commands.launcher.local_run import DONE, LocalRun
from headpond.config import RunConfig
from headpond.demo import tiny_moe
from headpond.inspection import run_json
from headpond.inspection.audit import audit_at_end
from headpond.ledger import queries, schema
from headpond.servers.dashboard.report import write_report
from headpond.store import open_store

# Event loop -> prefix of its columns in metrics.jsonl.
LAGS = {"orchestrator": "event_loop_lag", "rollout worker": "worker_lag"}


def collect(settings: RunConfig, run: LocalRun, *, seconds: float) -> dict[str, Any]:
    directory = settings.run_dir
    audit = audit_at_end(directory)
    store = open_store(settings.store_url)
    manifests = read_manifests(store)
    totals = [manifest.totals for manifest in manifests.values()]
    metrics = curve.read_lines(directory / curve.METRICS)
    paths = {"run": directory, "config": directory / "demo.toml", "logs": directory / "logs"}
    if manifests:  # those of the last step
        paths["manifest"] = Path(store.location(manifest_key(max(manifests))))
        if jsonl := manifests[max(manifests)].ranks[0].rollouts_jsonl:
            paths["rollouts"] = Path(store.location(jsonl.key))
    paths |= {"metrics": directory / curve.METRICS, "report": write_report([directory])}
    with schema.reading(run_json.ledger_path(directory)) as connection:
        routed_experts_bytes = queries.run_state(connection).experts_bytes
    done = run.status is not None and run.status.phase == DONE
    return {
        "ended": run.stopped_by or (DONE if done else "the orchestrator was stopped"),
        "seconds": round(seconds, 1),
        "steps": settings.steps,
        "delivered_steps": len(manifests),
        "trained_steps": read_trainer(directory).acked + 1,
        "rollouts": {key: audit[key] for key in ("planned", "delivered", "filtered", "in_flight", "dead", "fenced")},
        "tokens": sum(each.tokens for each in totals),
        "loss_tokens": sum(each.loss_tokens for each in totals),
        "routed_experts_bytes": routed_experts_bytes,
        "event_loop_lag": {process: _largest(metrics, column) for process, column in LAGS.items()},
        "rewards": [line[curve.MEAN] for line in metrics],
        "last_rewards": curve.by_environment(metrics[-1]) if metrics else {},
        "alignment": _alignment(directory),
        "audit": audit,
        "paths": {name: str(path) for name, path in paths.items() if path.exists()},
    }


def summary_facts(settings: RunConfig, summary: Mapping[str, Any]) -> Iterator[Fact]:
    trained = "all" if summary["trained_steps"] == summary["delivered_steps"] else f"{summary['trained_steps']:,}"
    yield Fact("demo", f"{summary['ended']} after {summary['seconds']:.0f} s", alarm=summary["ended"] != DONE)
    yield Fact(
        "steps", f"{summary['delivered_steps']:,} of {summary['steps']:,} delivered, {trained} read by the trainer"
    )
    yield Fact("rollouts", facts.equation(summary["rollouts"]))
    if summary["rollouts"]["filtered"]:
        yield Fact("filtered", facts.listed(summary["rollouts"]["filtered"]))
    yield Fact("tokens", f"{summary['tokens']:,} in the batches, {summary['loss_tokens']:,} of them in the loss")
    shape = f"{tiny_moe.LAYERS} layers, top {tiny_moe.TOPK} of {tiny_moe.EXPERTS}"
    yield Fact("experts", f"{summary['routed_experts_bytes'] / 1e6:,.1f} MB of routed experts written ({shape})")
    for process, lag in summary["event_loop_lag"].items():
        yield Fact("loop lag", f"{facts.loop_lag(lag)} in the worst step: {process}")
    alignment = summary["alignment"]
    yield Fact(
        "alignment",
        f"{alignment['aligned']:,} of {alignment['tokens']:,} logprobs computed again with the weights of "
        f"{alignment['versions']} versions: within {alignment['largest_difference']:.0e} of the engine's",
    )
    yield from reward_facts(settings)
    yield verdict(summary["audit"])
    yield Fact("", "")
    for name, path in summary["paths"].items():
        yield Fact(name, str(short(Path(path))))
    for command in ("audit", "status", "dashboard"):
        yield Fact("inspect", f"{_command()} {command} {short(settings.run_dir)}")


def reward_facts(settings: RunConfig) -> Iterator[Fact]:
    """The reward of the first and the last step in words, and of every step in a drawing."""
    if reward := curve.first_and_last(settings.run_dir):
        yield Fact("reward", reward)
        rewards = [line[curve.MEAN] for line in curve.read_lines(settings.run_dir / curve.METRICS)]
        for line in curve.drawn(rewards, settings.steps):
            yield Fact("", line)


def _largest(metrics: list[dict[str, Any]], column: str) -> dict[str, float]:
    """Over the steps, each since the one before."""
    return {
        f"{name}_s": max((line.get(f"{column}/{name}", 0.0) for line in metrics), default=0.0)
        for name in ("p99", "max")
    }


def _alignment(directory: Path) -> dict[str, Any]:
    """Results of the trainer, which computes the recorded logprobs again; a step that was repeated counts once."""
    steps = {line["step"]: line for line in curve.read_lines(directory / "training.jsonl")}
    return {
        "tokens": sum(line["tokens"] for line in steps.values()),
        "aligned": sum(line["aligned"] for line in steps.values()),
        "largest_difference": max((line["largest_difference"] for line in steps.values()), default=0.0),
        "versions": len({version for line in steps.values() for version in line["versions"]}),
    }


def _command() -> str:
    """`headpond` as the user can type it: after `make demo` it is not on PATH."""
    program = Path(sys.argv[0])
    return program.name if shutil.which(program.name) else str(short(program))
