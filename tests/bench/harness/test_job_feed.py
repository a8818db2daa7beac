from pathlib import Path
from typing import Any

from bench.harness.job_feed import JobFeed


class Replies:
    """A Redis whose stream holds the reply of each submitted job twice."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = (directory / "store").as_uri()
        self.redis = self
        self.jobs: list[str] = []

    def lpush(self, queue: str, *messages: bytes) -> None:
        for number in range(len(messages)):
            job = f"r{len(self.jobs) + 1:08d}"
            self.jobs.append(job)
            (self.directory / f"store/rollouts/{job}/1.x").mkdir(parents=True)
            assert number < 3

    def xread(self, streams: dict[str, str], **_: Any) -> list[Any]:
        return [("stream", [(b"1-0", {b"reply": self.reply(job)}) for job in self.jobs for _ in range(2)])]

    def xtrim(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def reply(job: str) -> bytes:
        columns = f'{{"key": "rollouts/{job}/1.x/columns"}}'
        result = f'{{"policy_error": null, "columns": {columns}}}'
        return f'{{"job": "{job}", "outcome": "done", "result": {result}}}'.encode()


def test_a_reply_that_arrives_twice_settles_its_job_once(tmp_path: Path) -> None:
    feed = JobFeed(cluster=Replies(tmp_path))  # type: ignore[arg-type]
    feed.top_up("noop", 3)
    assert (feed.submitted, feed.finished) == (3, 3)
    assert not list((tmp_path / "store/rollouts").iterdir())
