"""What a demo came to: figures from the run directory, and the paths of what it made."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cli import facts
from cli.audit import verdict
from cli.demo.course import DONE, Course
from cli.demo.options import Options, short
from cli.facts import Fact
from orchestrator import run_dir
from orchestrator.ledger.audit import audit
from penstock.batches import Manifest, read_manifests, read_trainer
from penstock.batches.manifest import manifest_path
from penstock.ledger import queries, schema
from penstock.store import Store


def collect(options: Options, course: Course) -> dict[str, Any]:
    """Everything is read again from what is on the disk, but for the lag and the trainer's last words."""
    found = audit(options.run_dir)
    store = Store(run_dir.store_path(options.run_dir))
    manifests = read_manifests(store)
    totals = [manifest.totals for manifest in manifests.values()]
    return {
        "ended": course.stopped or DONE,
        "seconds": round(course.seconds, 1),
        "steps": options.steps,
        "delivered_steps": len(manifests),
        "trained_steps": read_trainer(options.run_dir).acked + 1,
        "rollouts": {key: found[key] for key in ("planned", "delivered", "filtered", "in_flight", "dead", "fenced")},
        "tokens": sum(each.tokens for each in totals),
        "loss_tokens": sum(each.loss_tokens for each in totals),
        "routed_experts_bytes": _routed_bytes(options.run_dir),
        "event_loop_lag": course.progress.worst,
        "trainer": course.progress.trainer,
        "audit": found,
        "paths": {name: str(path) for name, path in _paths(options, store, manifests).items() if path.exists()},
    }


def show(options: Options, found: Mapping[str, Any]) -> Iterator[Fact]:
    trained = "all" if found["trained_steps"] == found["delivered_steps"] else f"{found['trained_steps']:,}"
    yield Fact("demo", f"{found['ended']} after {found['seconds']:.0f} s", alarm=found["ended"] != DONE)
    yield Fact("steps", f"{found['delivered_steps']:,} of {found['steps']:,} delivered, {trained} read by the trainer")
    yield Fact("rollouts", facts.equation(found["rollouts"]))
    if found["rollouts"]["filtered"]:
        yield Fact("filtered", facts.listed(found["rollouts"]["filtered"]))
    yield Fact("tokens", f"{found['tokens']:,} in the batches, {found['loss_tokens']:,} of them in the loss")
    if options.routes:
        shape = f"{facts.counted(options.routes.layers, 'layer')}, top {options.routes.topk}"
        yield Fact("experts", f"{found['routed_experts_bytes'] / 1e6:,.1f} MB of routed experts written ({shape})")
    for process, lag in found["event_loop_lag"].items():
        yield Fact("loop lag", f"{facts.loop_lag(lag)} in the worst 10 s: {process}")
    if found["trainer"]:
        yield Fact("trainer", found["trainer"])
    yield verdict(found["audit"])
    yield Fact("", "")
    for name, path in found["paths"].items():
        yield Fact(name, str(short(Path(path))))
    yield Fact("look", f"{_command()} audit {short(options.run_dir)}")
    yield Fact("", f"{_command()} status {short(options.run_dir)}")


def _paths(options: Options, store: Store, manifests: Mapping[int, Manifest]) -> dict[str, Path]:
    """Of the last step, where several have such a file."""
    paths = {"run": options.run_dir, "config": options.config, "logs": options.logs}
    if manifests:
        last = max(manifests)
        paths["manifest"] = manifest_path(store, last)
        if jsonl := manifests[last].ranks[0].rollouts_jsonl:
            paths["rollouts"] = store.path(jsonl.key)
    return {**paths, "metrics": options.run_dir / "metrics.jsonl"}


def _routed_bytes(directory: Path) -> int:
    with schema.reading(run_dir.ledger_path(directory)) as connection:
        return queries.routed_experts_bytes(connection)


def _command() -> str:
    """As this user can type it: after `make demo` it is on no PATH."""
    own = Path(sys.argv[0])
    return own.name if shutil.which(own.name) else str(short(own))
