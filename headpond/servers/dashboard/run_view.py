"""A run directory as the dashboard reads it, and the pages' JSON.

Every method reads files and blocks: call it in a thread.
"""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from headpond.batches import Manifest, read_trainer
from headpond.errors import BatchError, LedgerError, NotFound
from headpond.ids import RolloutId
from headpond.inspection import run_json
from headpond.inspection.run_state import State, last_status, state_of, status_age_s, why_idle
from headpond.inspection.why import why
from headpond.ledger import histories, pages, queries, schema
from headpond.ledger.states import RolloutState
from headpond.ledger.waterfall import Waterfall
from headpond.servers.dashboard import recording
from headpond.servers.dashboard.curves import Curves
from headpond.servers.dashboard.recording import TokenTexts, token_texts
from headpond.store import Store, open_store
from headpond.store.columns import Columns
from headpond.store.opening import run_store_url

# Rollouts of one page.
PAGE_MOST = 200
STEPS_SHOWN = 12
# An answer of `why` is repeated for this long.
WHY_S = 3.0
FROM_STATUS = {"phase", "at", "running_s", "step", "steps", "policy_version", "rollouts_per_s", "tokens_per_s",
               "queued", "waiting_jobs", "submitted_jobs", "running_by_worker", "excluded_workers", "replicas",
               "stored_bytes", "notes", "evaluations", "process", "http"}  # fmt: skip
CURVE_KEYS = ("reward_mean", "played_reward_mean", "completion_tokens/mean", "rollouts_per_s", "tokens_per_s",
              "staleness_mean", "staleness_max", "entropy", "trainer/kl", "trainer/entropy", "filtered_rate",
              "time/step_s")  # fmt: skip
KEY = re.compile(r"[\w./:-]{1,200}")


class RunView:
    def __init__(self, directory: Path, tokenizer: str | None = None, *, may_begin_later: bool = False) -> None:
        """RunError if it is not the directory of a run, unless the run may begin later."""
        self.path = directory.resolve()
        self.name = self.path.name
        self._may_begin_later = may_begin_later
        if not may_begin_later:
            self._identity()
        self._curves = Curves(self.path)
        self._waterfall = Waterfall()
        self._summing = threading.Lock()
        self._explaining = threading.Lock()
        self._explained_at, self._causes = -WHY_S, list[str]()
        self._tokenizer = tokenizer

    def _identity(self) -> dict[str, Any]:
        """The content of run.json, which a resumed run rewrites. NotFound for a run that has not begun."""
        if self._may_begin_later and not (self.path / "run.json").exists():
            raise NotFound(f"{self.path} has no run yet. This page shows it once `headpond run` has begun it")
        return run_json.read(self.path)

    @contextmanager
    def _ledger(self) -> Iterator[Connection]:
        """The ledger of one moment. LedgerError if it cannot be read; it may be on another host."""
        path = self.path / self._identity()["ledger"]
        with schema.reading(path) as connection, queries.snapshot(connection):
            yield connection

    def _store(self) -> Store:
        return open_store(run_store_url(self.path, self._identity()["store"]))

    def _trainer(self) -> dict[str, Any]:
        try:
            return asdict(read_trainer(self.path))
        except (BatchError, OSError) as error:
            return {"error": str(error)}

    @cached_property
    def _texts(self) -> TokenTexts | None:
        return token_texts(self._tokenizer, self.settings()["settings"])

    def summary(self) -> dict[str, Any]:
        status = last_status(self.path)
        try:
            run, state = self._identity()["run"], state_of(self.path, status)
        except NotFound:
            run, state = None, State.NOT_BEGUN
        return {
            "name": self.name,
            "path": str(self.path),
            "run": run,
            "state": state,
            "step": status.step,
            "steps": status.steps,
        }

    def overview(self) -> dict[str, Any]:
        status = last_status(self.path)
        state = state_of(self.path, status)
        self._curves.read()
        lags = {"orchestrator": status.event_loop_lag} if status.event_loop_lag else {}
        return {
            "name": self.name,
            "run": self._identity()["run"],
            "state": state,
            "status_age_s": status_age_s(status),
            "waiting_for": status.waiting_for if state is State.RUNNING else why_idle(self.path, state, status),
            "status": status.model_dump(include=FROM_STATUS, exclude_unset=True),
            "lags": lags | status.other_loops,
            "last_steps": self._curves.last(STEPS_SHOWN),
            "trainer": self._trainer(),
            **self._counts(),
        }

    def why(self) -> dict[str, Any]:
        """Explain why the run waits. This may ask Redis and engines, so the last answer is kept for some seconds."""
        self._identity()
        with self._explaining:
            if time.monotonic() - self._explained_at > WHY_S:
                state = state_of(self.path, last_status(self.path))
                causes = [] if state is State.DONE else why(self.path)["causes"]
                self._causes, self._explained_at = causes, time.monotonic()
            return {"causes": self._causes}

    def _counts(self) -> dict[str, Any]:
        try:
            with self._ledger() as connection:
                return {
                    **queries.progress(connection),
                    "deaths": queries.dead_jobs(connection, limit=8),
                    "ledger_error": None,
                }
        except LedgerError as error:
            return {"rollouts": last_status(self.path).rollouts or None, "deaths": [], "ledger_error": str(error)}

    def curves(self, keys: list[str]) -> dict[str, Any]:
        complete = self._curves.read()
        wanted = [key for key in keys if KEY.fullmatch(key)] or list(CURVE_KEYS)
        return {"complete": complete, "keys": self._curves.keys(), **self._curves.series(wanted)}

    def settings(self) -> dict[str, Any]:
        """Dotted name -> value, without paths, addresses and secrets."""
        identity = self._identity()
        return {"settings": identity.get("settings") or {}, "changed": identity.get("changed", [])}

    def waterfall(self) -> dict[str, Any]:
        with self._summing, self._ledger() as connection:
            return self._waterfall.read(connection)

    def rollouts(self, wanted: pages.Filter, before: pages.Key | None, limit: int) -> dict[str, Any]:
        with self._ledger() as connection:
            page = pages.rollouts_page(connection, wanted, before=before, limit=max(1, min(limit, PAGE_MOST)))
        return {"rows": page.rows, "next": str(page.next) if page.next else None}

    def group(self, group: str) -> dict[str, Any]:
        rows, _ = self._read_group(group)
        with self._ledger() as connection:
            events = histories.group_events(connection, group)
        described = {"environment": rows[0]["environment"], "example": rows[0]["example"]}
        return {"group": group, **described, "rollouts": rows, "events": events}

    def _read_group(self, group: str) -> tuple[list[pages.Row], list[pages.Row]]:
        """Its rollouts with their errors and results, and its jobs."""
        with self._ledger() as connection:
            rows, kept = pages.group_rows(connection, group), histories.kept_of_group(connection, group)
        if not rows:
            raise NotFound(f"{self.name} has no group {group}")
        kept_of = {row["index"]: (kept.errors.get(row["index"]), kept.results.get(row["index"])) for row in rows}
        return [row | dict(zip(("error", "result"), kept_of[row["index"]], strict=True)) for row in rows], kept.jobs

    def _read_rollout(self, rollout: str) -> tuple[pages.Row, list[pages.Row], int]:
        group, index = RolloutId.parse(rollout)
        rows, jobs = self._read_group(group)
        for row in rows:
            if row["index"] == index:
                return row, jobs, len(rows)
        raise NotFound(f"{self.name} has no rollout {rollout}")

    def rollout(self, rollout: str) -> dict[str, Any]:
        row, jobs, size = self._read_rollout(rollout)
        with self._ledger() as connection:
            events = histories.group_events(connection, row["group"])
        own = [job for job in jobs if job["id"] == rollout or not RolloutId.match(job["id"])]
        events = [event for event in events if event["subject"] in (rollout, row["group"])]
        return {**row, "group_rollouts": size, "jobs": own, "events": events}

    def _recorded(self, rollout: str) -> tuple[pages.Row, recording.Files, Manifest | None, Columns | None]:
        row, _, _ = self._read_rollout(rollout)
        store = self._store()
        manifest = recording.manifest_of(store, row["step"])
        files = recording.files_of(row["result"], manifest, rollout)
        return row, files, manifest, recording.opened(store, files)

    def conversation(self, rollout: str) -> dict[str, Any]:
        row, _, _, columns = self._recorded(rollout)
        if columns is None:
            return {"kept": False, "why": _why_deleted(row), "conversations": []}
        talks, timeline = recording.conversations(columns), recording.timeline(columns)
        return {"kept": True, "conversations": talks, "timeline": timeline, "error": columns.error}

    def message_part(self, rollout: str, conversation: int, message: int, name: str, start: int) -> dict[str, Any]:
        _, _, _, columns = self._recorded(rollout)
        if columns is None:
            raise NotFound(f"the files of {rollout} are deleted")
        return recording.message_part(columns, conversation, message, name, start)

    def tokens(self, rollout: str, start: int, count: int) -> dict[str, Any]:
        row, files, manifest, columns = self._recorded(rollout)
        if columns is None:
            return {"kept": False, "why": _why_deleted(row)}
        store, extra = self._store(), {}
        extra |= recording.of_batch(self.path, store, manifest, rollout, columns)
        extra |= recording.routed(store, files, columns.input_ids.size)
        page = recording.token_page(columns, start, count, texts=self._texts, extra=extra)
        return {"kept": True, "advantage": row["advantage"], "logprobs_mode": columns.logprobs_mode, **page}


def _why_deleted(row: dict[str, Any]) -> str:
    if row["state"] == RolloutState.FILTERED:
        return f"It was dropped ({row['reason']}): files of dropped rollouts are deleted."
    if row["state"] in (RolloutState.DELIVERED, RolloutState.TRAINED):
        return "The files of its step are deleted (trainer.keep_steps keeps more), or on another host."
    return "It has no result yet." if row["state"] != RolloutState.DEAD else "It died without a result."
