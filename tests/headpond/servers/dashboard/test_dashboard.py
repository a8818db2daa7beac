import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from support.run_dirs import MadeRun, make_run

from headpond.batches import BatchReader
from headpond.errors import RunError
from headpond.servers.dashboard.dashboard import COOKIE, STATIC, Dashboard
from headpond.servers.dashboard.run_view import RunView

HOSTILE = "<script>alert(1)</script>\u202eright to left\x00\x1b[31m</textarea><img src=x onerror=alert(2)>"


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    long = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "x" * 1_000_000}]
    return make_run(tmp_path / "run", conversations=[long])


def read(run: MadeRun, *paths: str, secret: str | None = None, **request: Any) -> list[tuple[int, Any, Any]]:
    """(status, body, headers) of each path."""

    async def responses() -> list[tuple[int, Any, Any]]:
        app = Dashboard([RunView(run.path)], secret).app()
        async with TestClient(TestServer(app)) as client:
            return [await _response(client.get(path, allow_redirects=False, **request)) for path in paths]

    return asyncio.run(responses())


async def _response(response: Awaitable[Any]) -> tuple[int, Any, Any]:
    answer = await response
    body = await answer.read()
    is_json = answer.content_type == "application/json"
    return answer.status, json.loads(body) if is_json else body, answer.headers


def test_the_overview_of_a_crashed_run_says_that_its_process_has_died(run: MadeRun) -> None:
    ((status, overview, _),) = read(run, "/api/runs/0/overview")
    assert status == 200
    assert overview["state"] == "stopped"
    (cause,) = overview["waiting_for"]
    assert re.search(r"orchestrator is not running \(.*died\): .*`headpond run`", cause)
    assert overview["rollouts"]["planned"] == 15
    assert overview["deaths"] == [{"kind": "rollout", "error": "boom", "jobs": 3}]
    assert [line["step"] for line in overview["last_steps"]] == [1, 0]


def test_the_banner_has_what_headpond_why_says(run: MadeRun) -> None:
    ((status, why, _),) = read(run, "/api/runs/0/why")
    assert status == 200
    assert any("the orchestrator is not running (its process has died)" in cause for cause in why["causes"])


def test_a_stopped_run_with_a_redis_of_its_own_only_says_how_to_resume_it(run: MadeRun) -> None:
    (run.path / "redis").mkdir()
    resumed = "nothing is lost, `headpond up` resumes the run"
    status = json.loads((run.path / "status.json").read_text())
    status["process"]["host"] = socket.gethostname()  # its engine, which `headpond up` has started, is asked from here
    (run.path / "status.json").write_text(json.dumps(status))
    ((_, why, _),) = read(run, "/api/runs/0/why")
    assert why["causes"] == [f"the orchestrator is not running (its process has died): {resumed}"]


def test_curves_grow_with_the_file(run: MadeRun) -> None:
    view = RunView(run.path)
    assert view.curves(["reward_mean"])["series"] == {"reward_mean": [0.0, 0.25]}
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward_mean": 0.75}\n{"step": 3, "rew')
    curves = view.curves(["reward_mean", "tokens_per_s"])
    assert curves["steps"] == [0, 1, 2]
    assert curves["series"] == {"reward_mean": [0.0, 0.25, 0.75], "tokens_per_s": [4e5, 8e5, None]}
    (run.path / "metrics.jsonl").rename(run.path / "metrics.1.jsonl")
    (run.path / "metrics.jsonl").write_text('{"step": 3, "reward_mean": 1}\n')
    assert view.curves(["reward_mean"])["steps"] == [0, 1, 2, 3]


def test_more_steps_than_points_are_averaged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [json.dumps({"step": step, "reward_mean": step % 2}) for step in range(1000)]
    (run.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    curves = RunView(run.path).curves(["reward_mean"])
    assert curves["series"]["reward_mean"] == [0.5] * 500
    assert curves["steps"][-1] == 999


def test_hostile_text_is_passed_on_as_json_and_a_long_message_in_parts(run: MadeRun) -> None:
    path = "/api/runs/0/rollouts/g0000001-0"
    (_, talk, headers), (_, part, _) = read(
        run, f"{path}/conversation", f"{path}/part?conversation=0&message=1&name=content&start=900000"
    )
    messages = talk["conversations"][0]
    assert messages[0]["parts"][0]["text"] == HOSTILE
    assert len(messages[1]["parts"][0]["text"]) == 20_000
    assert messages[1]["parts"][0]["length"] == 1_000_000
    assert part == {"text": "x" * 100_000, "length": 1_000_000}
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_tokens_have_what_the_batch_and_the_trainer_know_of_them(run: MadeRun) -> None:
    for rank in range(2):
        reader = BatchReader(run.path, data_rank=rank, data_ranks=2, timeout_s=0)
        batch = next(reader)
        reader.annotate(batch, logprobs=[batch.column("logprobs") - np.float32(0.5)])
    made = run.rollouts["g0000001-1"]
    page = RunView(run.path).tokens("g0000001-1", 0, 4096)
    columns, values = made.columns, page["values"]
    assert page["ids"] == columns.input_ids.tolist()
    assert page["mask"] == columns.loss_mask.tolist()
    trained = np.flatnonzero(columns.loss_mask).tolist()
    assert {values["advantage"][at] for at in trained} == {round(float(np.float32(made.planned.advantage)), 5)}
    assert [values["mismatch"][at] for at in trained] == [pytest.approx(-0.5, abs=1e-4)] * len(trained)
    assert values["routed"] == np.concatenate(made.valid).astype(float).tolist()
    assert {value for value, mask in zip(values["logprob"], page["mask"], strict=True) if not mask} == {None}
    assert len(page["samples"]) == 2
    assert page["version"][0] == -1


def test_a_timeline_has_turns_tools_and_grading_in_their_order(run: MadeRun) -> None:
    spans = RunView(run.path).conversation("g0000001-0")["timeline"]
    assert [(span["kind"], span["name"], span["begin_s"], span["seconds"]) for span in spans] == [
        ("rollout", "", 0.0, 1.85),
        ("turn", "0", 0.1, 0.5),
        ("tool", "search", 0.6, 0.15),
        ("turn", "1", 0.8, 0.3),
        ("turn", "2", 1.2, 0.2),
        ("grading", "judge", 1.5, 0.3),
    ]


def test_a_recording_of_an_earlier_release_has_no_times(run: MadeRun) -> None:
    assert RunView(run.path).conversation("g0000002-0")["timeline"] == []


def test_tokens_of_a_dropped_rollout_are_gone_and_the_answer_says_why(run: MadeRun) -> None:
    page = RunView(run.path).tokens("g0001000-0", 0, 10)
    assert page.keys() == {"kept", "why"}
    assert (page["kept"], "dropped (zero_variance)" in page["why"]) == (False, True)


def test_a_policy_allows_own_files_only_and_nothing_is_inline(run: MadeRun) -> None:
    ((status, page, headers),) = read(run, "/")
    assert status == 200
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in headers["Content-Security-Policy"]
    assert b"<style" not in page
    assert b"<script>" not in page


@pytest.mark.parametrize("path", ["..%2f..%2f..%2fpyproject.toml", "pages/../../dashboard.py", "none.js", "%00"])
def test_only_files_of_the_static_folder_are_served(run: MadeRun, path: str) -> None:
    ((status, body, _),) = read(run, f"/static/{path}")
    assert status == 404
    assert "error" in body


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("rollouts?state=none", 400),
        ("rollouts?before=x", 400),
        ("rollouts?step=x", 400),
        ("rollouts/none", 400),
        ("rollouts/g0009999-0", 404),
        ("rollouts/g0000001-99", 404),
        ("groups/none", 400),
        ("groups/g0009999", 404),
        ("none", 404),
    ],
)
def test_what_is_not_there_is_an_error_with_its_reason(run: MadeRun, path: str, status: int) -> None:
    ((found, body, _),) = read(run, f"/api/runs/0/{path}")
    assert (found, [*body]) == (status, ["error"])


def test_nothing_can_be_changed(run: MadeRun) -> None:
    async def status() -> int:
        async with TestClient(TestServer(Dashboard([RunView(run.path)], None).app())) as client:
            return (await client.post("/api/runs")).status

    assert asyncio.run(status()) == 405


def test_a_page_of_another_site_that_resolves_to_this_host_reads_nothing(run: MadeRun) -> None:
    ((status, _, _),) = read(run, "/api/runs", headers={"Host": "attacker.example:7788"})
    assert status == 401


def test_a_secret_is_required_once_and_then_kept_in_a_cookie(run: MadeRun) -> None:
    (refused, _, _), (redirected, _, headers) = read(run, "/api/runs", "/?secret=open", secret="open")
    assert refused == 401
    assert (redirected, headers["Location"]) == (302, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    for request in ({"cookies": {COOKIE: "open"}}, {"headers": {"Authorization": "Bearer open"}}):
        ((status, _, _),) = read(run, "/api/runs", secret="open", **request)
        assert status == 200
    ((status, _, _),) = read(run, "/api/runs", secret="open", cookies={COOKIE: "other"})
    assert status == 401


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run directory"):
        RunView(tmp_path)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "later"

    async def answers() -> list[tuple[int, Any, Any]]:
        async with TestClient(TestServer(Dashboard([RunView(path, may_begin_later=True)], None).app())) as client:
            found = [await _response(client.get(f"/api/{each}")) for each in ("runs", "runs/0/overview")]
            make_run(path)
            return [*found, *[await _response(client.get(f"/api/{each}")) for each in ("runs", "runs/0/overview")]]

    (_, before, _), (status, error, _), (_, after, _), (then, overview, _) = asyncio.run(answers())
    assert before["runs"][0]["state"] == "not begun"
    assert (status, "has no run yet" in error["error"]) == (404, True)
    assert after["runs"][0]["state"] == "stopped"
    assert (then, overview["rollouts"]["planned"]) == (200, 15)


def test_reading_leaves_the_run_directory_as_it_was(run: MadeRun) -> None:
    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}

    before = files()
    view = RunView(run.path)
    reads: list[Callable[[], Any]] = [view.overview, view.waterfall, lambda: view.tokens("g0000001-0", 0, 10)]
    for each in reads:
        each()
    assert files() == before


def test_no_script_makes_html_of_text_or_runs_it() -> None:
    """The browser's test shows it; this finds the call that would allow it."""
    for path in STATIC.rglob("*.js"):
        text = path.read_text()
        for call in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "http://",
            "https://",
        ):
            allowed = path.name == "dom.js" and call == "http://"  # the name of the namespace of SVG
            assert allowed or call not in text, f"{path.name}: {call}"
