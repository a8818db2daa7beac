"""Recorded rollouts through other filters, estimators, shaping and packing: what is kept, which advantages, and why.

Of steps whose token columns are kept. Nothing is played again, and the run is only read. A verdict that needs tokens
which are deleted, or the clock of the run (stale, cancelled), is that of the run.
"""

import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headpond import config as configuration
from headpond.advantages import resolve
from headpond.batches import BatchPlan, BatchRollout, EncodedRank, Manifest, read_manifest
from headpond.batches.credit import credit_key
from headpond.batches.writer import encode_rank
from headpond.config.sources import toml_value
from headpond.errors import BlobError, ConfigError, RunError
from headpond.filters import Verdict as Matches
from headpond.filters import judge, rollout_filters
from headpond.ids import GroupId
from headpond.inspection import run_json
from headpond.ledger import histories, pages, queries, schema
from headpond.orchestrator.exchange.inputs import batch_rollout, plan_of, values_of
from headpond.records.inputs import GroupInputs, StepAdvantages
from headpond.records.rollout import RolloutResult
from headpond.store import open_store
from headpond.store.opening import run_store_url
from headpond.store.read_through import ReadThroughStore
from headpond.tasks.stages.advantage import estimate_group
from headpond.tasks.stages.batch_phase import estimate_step
from headpond.tasks.stages.filter import read_tokens

CHANGEABLE = ("filters.", "advantages.", "batch.", "vocab_size")
# Beginnings of the run's settings that decide what is computed here.
READ = (*CHANGEABLE, "rollouts.group_size", "engine.logprobs_mode")
# Built-in filters that are applied again. Staleness depends on when the run composed its steps.
TOKEN_FILTERS, GROUP_FILTERS = ("gibberish", "repetition", "overlong"), ("zero_variance", "difficulty")
# Parts of the names of files that are made here and deleted at once.
EXECUTION, STEP_CREDIT = "redo", "plans/redo.credit.json"
TOKENS_DELETED = "its tokens are deleted, so that it cannot be packed"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision about a rollout."""

    dropped: str | None  # the filter that dropped it, or another reason
    advantage: float | None
    masked: bool = False
    # key of the file with the advantages of its turns, for an estimator that gives some
    credit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Redone:
    rollout: str
    group: str
    environment: str
    reward: float
    was: Verdict
    now: Verdict
    why: str | None  # why they differ; None if they do not


@dataclass(frozen=True, kw_only=True)
class Packed:
    rollouts: int
    micro_batches: int
    tokens: int
    loss_tokens: int


@dataclass(frozen=True, kw_only=True)
class RedoneStep:
    step: int
    rollouts: list[Redone]
    was: Packed
    now: Packed
    same_bytes: bool  # whether every rank's file is the one that the run delivered


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rollout of a group that was closed while the step was made."""

    id: str
    row: pages.Row
    result: RolloutResult
    delivered: BatchRollout | None
    matches: Matches | None  # matches of the token filters; None if its tokens are deleted


class Redo:
    def __init__(self, run_dir: Path, changes: Sequence[str] = ()) -> None:
        """`changes`: `setting=value`, as in TOML."""
        identity = run_json.read(run_dir)
        recorded: dict[str, Any] = identity["settings"]
        self.changes = dict(map(parse_change, changes))
        settings = {key: value for key, value in recorded.items() if key.startswith(READ) and value is not None}
        self._config = configuration.load(None, flags={**settings, **self.changes}, environ={})
        self._ledger = run_dir / identity["ledger"]
        self._store = open_store(run_store_url(run_dir, identity["store"]))
        filters = self._config.filters
        self._token_filters = {*TOKEN_FILTERS, *_named(recorded, "filters.custom."), *filters.custom}
        self._group_filters = {*GROUP_FILTERS, *_named(recorded, "filters.custom_groups."), *filters.custom_groups}

    def steps(self) -> list[int]:
        """Whose columns are kept."""
        with schema.reading(self._ledger) as connection:
            first = queries.released_steps(connection)["columns_released"]
            return sorted(step for step in queries.delivered_steps(connection) if step >= first)

    def step(self, step: int) -> RedoneStep:
        manifest = read_manifest(self._store, step)
        if manifest is None:
            raise RunError(f"step {step} has no manifest: it is not sealed, or released (trainer.keep_manifests)")
        members = self._members(manifest)
        if any(member.delivered and member.matches is None for member in members):
            kept = ", ".join(map(str, self.steps())) or "none"
            raise RunError(
                f"the token columns of step {step} are deleted (trainer.keep_steps); kept are those of: {kept}"
            )
        groups: dict[str, list[Member]] = {}
        for member in members:
            groups.setdefault(member.row["group"], []).append(member)
        with tempfile.TemporaryDirectory(prefix="headpond-redo-") as directory:
            scratch = ReadThroughStore(Path(directory).as_uri(), self._store)
            verdicts = {id: each for group in groups.values() for id, each in self._judge(scratch, group).items()}
            packed = sorted(
                (member for member in members if member.matches and not verdicts[member.id].dropped),
                key=lambda member: member.id,
            )
            final = self._final(scratch, step, packed, verdicts)
            verdicts |= {id: replace(verdicts[id], advantage=number) for id, number in final.advantages.items()}
            rollouts = [_batch_rollout(member, verdicts[member.id]) for member in packed]
            plan = plan_of(self._config, step, rollouts, final.credit)
            files = range(plan.rules.data_ranks) if plan.rollouts else ()
            ranks = [encode_rank(scratch, plan, data_rank=rank, execution=EXECUTION) for rank in files]
        return RedoneStep(
            step=step,
            rollouts=[self._compared(member, verdicts[member.id]) for member in members],
            was=_packed(manifest.plan, manifest.ranks),
            now=_packed(plan, ranks),
            same_bytes=[_content(rank) for rank in ranks] == [_content(rank) for rank in manifest.ranks],
        )

    def _members(self, manifest: Manifest) -> list[Member]:
        delivered = {rollout.rollout: rollout for rollout in manifest.plan.rollouts}
        filters = rollout_filters(self._config.filters, vocab_size=self._config.vocab_size)
        with schema.reading(self._ledger) as connection, queries.snapshot(connection):
            found = [
                Member(id=row["id"], row=row, result=result, delivered=delivered.get(row["id"]), matches=None)
                for group in _groups(connection, manifest)
                for row, result in _results(connection, group)
            ]
        if missing := delivered.keys() - {member.id for member in found}:
            raise RunError(
                f"the ledger no longer has the whole results of step {manifest.plan.step} ({min(missing)}): raise "
                "trainer.keep_events_steps, or choose a later step"
            )
        return [replace(member, matches=self._matches(member.result, filters)) for member in found]

    def _matches(self, result: RolloutResult, filters: Sequence[Any]) -> Matches | None:
        """None if its tokens are deleted. The version that it is compared with is its own: see TOKEN_FILTERS."""
        try:
            return judge(read_tokens(self._store, result, result.version_first), filters) if result.columns else None
        except BlobError:
            return None

    def _judge(self, scratch: ReadThroughStore, group: list[Member]) -> dict[str, Verdict]:
        inputs = GroupInputs(
            group=group[0].row["group"],
            environment=group[0].row["environment"],
            example=group[0].row["example"],
            policy_version=0,
            members={member.id: self._read_again(member) for member in group},
        )
        result = estimate_group(scratch, inputs, self._config, execution=EXECUTION)
        return {
            member.id: Verdict(
                dropped=self._dropped(member) or result.dropped,
                advantage=result.advantages[member.id],
                masked=result.masked or bool(member.matches and member.matches.masked),
                credit=_credit_key(member) if result.credit else None,
            )
            for member in group
        }

    def _read_again(self, member: Member) -> RolloutResult:
        """An estimator that answers per turn reads the turns of those rollouts whose tokens are kept."""
        return member.result if member.matches else member.result.model_copy(update={"columns": None})

    def _dropped(self, member: Member) -> str | None:
        """Return why it is dropped: by a token filter now, or by the run where nothing can be judged again."""
        reason: str | None = member.row["reason"]
        if reason in self._group_filters or (reason in self._token_filters and member.matches):
            reason = None
        return reason or (member.matches.drop_reason if member.matches else None)

    def _final(
        self, scratch: ReadThroughStore, step: int, packed: list[Member], verdicts: Mapping[str, Verdict]
    ) -> StepAdvantages:
        """Run the batch phase, if the estimator has one, from the state that the step before has left."""
        first = {member.id: verdicts[member.id].advantage or 0.0 for member in packed}
        recipe = resolve(self._config.advantages, group_size=self._config.rollouts.group_size)
        if not recipe.has_batch_phase or not packed:
            return StepAdvantages(advantages=first, state=None)
        before = read_manifest(self._store, step - 1) if step else None
        inputs = values_of(
            [member.id for member in packed],
            [(member.row["group"], member.row["environment"], member.row["example"]) for member in packed],
            [member.result for member in packed],
            values=list(first.values()),
            credit=[verdicts[member.id].credit for member in packed],
            state=before.estimator_state if before else None,
        )
        return estimate_step(scratch, inputs, self._config, credit=STEP_CREDIT)

    def _compared(self, member: Member, now: Verdict) -> Redone:
        row = member.row
        was = Verdict(
            dropped=row["reason"], advantage=row["advantage"] if member.delivered else None, masked=row["masked"]
        )
        return Redone(
            rollout=member.id,
            group=row["group"],
            environment=row["environment"],
            reward=member.result.reward,
            was=was,
            now=now,
            why=self._why(member, was, now),
        )

    def _why(self, member: Member, was: Verdict, now: Verdict) -> str | None:
        if was.dropped and now.dropped:
            return None if was.dropped == now.dropped else f"{now.dropped} drops it, before {was.dropped} did"
        if now.dropped:
            return f"{now.dropped} drops it"
        if was.dropped:
            return f"{was.dropped} does not drop it any more" + ("" if member.matches else f"; {TOKENS_DELETED}")
        reasons = ["its loss is masked" if now.masked else "its loss is not masked"] if was.masked != now.masked else []
        if was.advantage != now.advantage:
            settings = [f"{key} = {value}" for key, value in self.changes.items() if key.startswith("advantages.")]
            reasons.append(", ".join(settings) or "other rollouts of its group or step are kept")
        return "; ".join(reasons) or None


def _named(settings: Mapping[str, Any], section: str) -> set[str]:
    """The names of the tables below a section."""
    return {key.removeprefix(section).partition(".")[0] for key in settings if key.startswith(section)}


def parse_change(text: str) -> tuple[str, Any]:
    """`advantages.estimator=rloo`; the value as in TOML, or a text."""
    key, equals, value = text.partition("=")
    if not equals or not key.startswith(CHANGEABLE):
        raise ConfigError(f"--set {text}: write setting=value, for a setting of [filters], [advantages] or [batch]")
    return key, toml_value(value)


def _groups(connection: sqlite3.Connection, manifest: Manifest) -> list[str]:
    """The step's groups, and those that were dropped while it was made."""
    query = "SELECT grp FROM histories WHERE step = ?"
    meanwhile = {str(GroupId(ordinal)) for (ordinal,) in connection.execute(query, (manifest.plan.step,))}
    return sorted(meanwhile | set(manifest.plan.groups))


def _results(connection: sqlite3.Connection, group: str) -> list[tuple[pages.Row, RolloutResult]]:
    """List every rollout of the group that has a result and did not die."""
    kept = histories.kept_of_group(connection, group).results
    rows = [row for row in pages.group_rows(connection, group) if row["state"] != "dead" and row["index"] in kept]
    return [(row, RolloutResult.model_validate(kept[row["index"]])) for row in rows]


def _batch_rollout(member: Member, verdict: Verdict) -> BatchRollout:
    row, advantage = member.row, verdict.advantage or 0.0
    return batch_rollout(
        member.id, row["group"], row["environment"], member.result,
        advantage=advantage, masked=verdict.masked, credit=verdict.credit,
    )  # fmt: skip


def _credit_key(member: Member) -> str | None:
    columns = member.result.columns
    return credit_key(columns.key, EXECUTION) if columns and member.matches else None


def _packed(plan: BatchPlan, ranks: Sequence[EncodedRank]) -> Packed:
    return Packed(
        rollouts=len(plan.rollouts),
        micro_batches=sum(rank.micro_batches for rank in ranks),
        tokens=sum(rank.tokens for rank in ranks),
        loss_tokens=sum(rank.loss_tokens for rank in ranks),
    )


def _content(rank: EncodedRank) -> tuple[int, str]:
    return rank.file.size, rank.file.checksum
