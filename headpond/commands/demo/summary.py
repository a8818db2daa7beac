"""Summary of a demo: figures read from the run directory, and the paths of its files."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headpond.batches import Manifest, read_manifests, read_trainer
from headpond.batches.manifest import manifest_key
from headpond.commands import curve, facts
from headpond.commands.audit import verdict
from headpond.commands.demo.lifecycle import DONE, Demo
from headpond.commands.demo.options import Options, short
from headpond.commands.facts import Fact
from headpond.demo import tiny_moe
from headpond.inspection import run_json
from headpond.ledger import queries, schema
from headpond.orchestrator import run_dir
from headpond.orchestrator.ledger.audit import audit_at_end
from headpond.servers.dashboard.report import FILE_NAME, write_report
from headpond.store import Store, open_store


def collect(options: Options, demo: Demo) -> dict[str, Any]:
    """Read everything from disk, except the lag and the trainer's last line."""
    result = audit_at_end(options.run_dir)
    store = open_store(run_dir.store_url(options.run_dir))
    manifests = read_manifests(store)
    totals = [manifest.totals for manifest in manifests.values()]
    metrics = curve.read_lines(options.run_dir / curve.METRICS)
    write_report([options.run_dir])
    return {
        "ended": demo.stopped or DONE,
        "seconds": round(demo.seconds, 1),
        "steps": options.steps,
        "delivered_steps": len(manifests),
        "trained_steps": read_trainer(options.run_dir).acked + 1,
        "rollouts": {key: result[key] for key in ("planned", "delivered", "filtered", "in_flight", "dead", "fenced")},
        "tokens": sum(each.tokens for each in totals),
        "loss_tokens": sum(each.loss_tokens for each in totals),
        "routed_experts_bytes": _routed_bytes(options.run_dir),
        "event_loop_lag": demo.progress.largest_lags,
        "trainer": demo.progress.trainer,
        "reward": curve.first_and_last(options.run_dir),
        "rewards": [line[curve.MEAN] for line in metrics],
        "last_rewards": curve.by_environment(metrics[-1]) if metrics else {},
        "alignment": _alignment(options.run_dir),
        "audit": result,
        "paths": {name: str(path) for name, path in _paths(options, store, manifests).items() if path.exists()},
    }


def summary_facts(options: Options, summary: Mapping[str, Any]) -> Iterator[Fact]:
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
        yield Fact("loop lag", f"{facts.loop_lag(lag)} in the worst 10 s: {process}")
    if summary["trainer"]:
        yield Fact("trainer", summary["trainer"])
        yield _alignment_fact(summary["alignment"])
    if rewards := summary["rewards"]:
        yield Fact("reward", summary["reward"])
        for line in curve.drawn(rewards, summary["steps"]):
            yield Fact("", line)
    yield verdict(summary["audit"])
    yield Fact("", "")
    for name, path in summary["paths"].items():
        yield Fact(name, str(short(Path(path))))
    yield Fact("inspect", f"{_command()} audit {short(options.run_dir)}")
    yield Fact("", f"{_command()} status {short(options.run_dir)}")
    yield Fact("", f"{_command()} dashboard {short(options.run_dir)}")


def _alignment(directory: Path) -> dict[str, Any]:
    """What the trainer found when it computed the recorded logprobs again; a step that was repeated counts once."""
    steps = {line["step"]: line for line in curve.read_lines(directory / "training.jsonl")}
    return {
        "tokens": sum(line["tokens"] for line in steps.values()),
        "aligned": sum(line["aligned"] for line in steps.values()),
        "largest_difference": max((line["largest_difference"] for line in steps.values()), default=0.0),
        "versions": len({version for line in steps.values() for version in line["versions"]}),
    }


def _alignment_fact(found: Mapping[str, Any]) -> Fact:
    return Fact(
        "alignment",
        f"{found['aligned']:,} of {found['tokens']:,} logprobs computed again with the weights of {found['versions']} "
        f"versions: within {found['largest_difference']:.0e} of the engine's",
    )


def _paths(options: Options, store: Store, manifests: Mapping[int, Manifest]) -> dict[str, Path]:
    """Files of the run; of the last step where every step has one."""
    paths = {"run": options.run_dir, "config": options.config, "logs": options.logs}
    if manifests:
        last = max(manifests)
        paths["manifest"] = Path(store.location(manifest_key(last)))
        if jsonl := manifests[last].ranks[0].rollouts_jsonl:
            paths["rollouts"] = Path(store.location(jsonl.key))
    return {**paths, "metrics": options.run_dir / curve.METRICS, "report": options.run_dir / FILE_NAME}


def _routed_bytes(directory: Path) -> int:
    with schema.reading(run_json.ledger_path(directory)) as connection:
        return queries.routed_experts_bytes(connection)


def _command() -> str:
    """`headpond` as the user can type it: after `make demo` it is not on PATH."""
    program = Path(sys.argv[0])
    return program.name if shutil.which(program.name) else str(short(program))
