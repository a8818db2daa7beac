"""Lists the files whose functions are called for one rollout of two turns: `make trace`.

In the worker from a call of `play`; in orchestrator, stages, encoder and reader
below the functions that handle a group.
A file that is only imported does not count. Of the Celery shell only what `play` is called from is missing.
"""

import asyncio
import logging
import os
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
ROOMS = ("headpond", "tasks", "workers", "orchestrator")
HANDLERS = {
    "Planner.plan", "Submitter.submit_waiting", "ReplyStream.accept", "Replies.apply", "Composer.drop_stale",
    "Composer.compose", "Composer.encoded", "Sealer._seal", "Ledger.deliver", "Ledger.commit_soon", "Writer._commit",
    "filter_group", "estimate", "encode", "BatchReader.__init__", "Batch._micro_batch", "write_reply",
    "Execution.done", "write_lease",
}  # fmt: skip


def file_of(frame: FrameType) -> str | None:
    """The path of a file of the product; `headpond/tasks` is a link to `tasks`."""
    name = frame.f_code.co_filename
    if not name.startswith(f"{ROOT}{os.sep}"):
        return None
    path = name.removeprefix(f"{ROOT}{os.sep}")
    for link in ROOMS[1:]:
        path = path.replace(f"headpond/{link}/", f"{link}/")
    return path if path.split("/")[0] in ROOMS else None


class Trace:
    """Files in the order of their first call; with `handlers` only below calls of these functions."""

    def __init__(self, handlers: Iterable[str] = ()) -> None:
        self.files: Counter[str] = Counter()
        self.switches = 0
        self.handlers_seen: set[str] = set()
        self._handlers = set(handlers)
        self._depth: defaultdict[int, list[str]] = defaultdict(list)
        self._last: dict[int, str] = {}

    def __enter__(self) -> "Trace":
        threading.setprofile_all_threads(self._on_event) if sys.version_info >= (3, 12) else threading.setprofile(
            self._on_event
        )
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return") or (path := file_of(frame)) is None:
            return
        thread, name = threading.get_ident(), frame.f_code.co_qualname
        within = self._depth[thread]
        if event == "return":
            if within and within[-1] == name:
                within.pop()
            return
        if name in self._handlers:
            within.append(name)
            self.handlers_seen.add(name)
        if self._handlers and not within:
            return
        self.files[path] += 1
        self.switches += self._last.get(thread) != path
        self._last[thread] = path

    def show(self, title: str) -> None:
        print(f"\n{title}: {len(self.files)} files, {self.files.total()} calls, {self.switches} switches of module")
        rooms = defaultdict[str, list[str]](list)
        for path in self.files:
            rooms[str(Path(path).parent)].append(Path(path).name)
        for room, names in rooms.items():
            print(f"  {room + '/':<32} {' '.join(names)}")


def in_the_worker() -> Trace:
    from support.engine_clients import attempt_of, loaded, run, stage_of
    from support.upstream import Response, answer, serving, user

    from headpond.environments import Score
    from headpond.playing.rollout import play

    class TwoTurns:
        async def rollout(self, example: Any, policy: Any) -> Score:
            first = await policy.chat([user("first")])
            await policy.chat([user("first"), first.message, user("second")])
            return Score(reward=0.5)

    trace = Trace()

    async def main() -> None:
        with serving(lambda request: Response(body=answer(request, "hello", routed=True))) as server:
            server.weights = "5"
            async with stage_of(Path(tempfile.mkdtemp()), server.url, model="routed") as stage:
                await asyncio.sleep(1.5)  # the replicas are polled
                await play(stage, loaded(TwoTurns()), 0, attempt_of("g0-0"))
                with trace:
                    await play(stage, loaded(TwoTurns()), 0, attempt_of("g1-3", attempt=2))

    threading.setprofile(trace._on_event)  # for threads that start before the traced rollout
    run(main)
    return trace


def in_the_pipeline() -> Trace:
    from simulation.world import World

    logging.disable(logging.ERROR)
    world = World(3, Path(tempfile.mkdtemp()))
    world.faults = []
    trace = Trace(HANDLERS)
    with trace:
        world.play()
    assert not world.violations, world.violations
    assert trace.handlers_seen == HANDLERS, f"renamed: {HANDLERS - trace.handlers_seen}"
    return trace


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    pipeline, worker = in_the_pipeline(), in_the_worker()
    worker.show("one rollout of two turns in the worker")
    pipeline.show("a group in orchestrator, stages, encoder and reader")
    print(f"\nboth: {len(worker.files | pipeline.files)} files")


if __name__ == "__main__":
    main()
