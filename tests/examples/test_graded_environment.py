import sys
from pathlib import Path

import pytest
from support.engine_clients import attempt_of, run, stage_of
from support.upstream import ReceivedRequest, Response, answer, serving

from headpond.config.engine import EnvironmentSettings
from headpond.environments import load_environments
from headpond.playing.rollout import play
from headpond.records.rollout import RolloutResult

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = {
    "right": "def f(n):\n    return sum(map(int, str(n)))",
    "wrong": "def f(n):\n    return n",
    "broken": "def f(n)",
    "endless": "import time; time.sleep(1000)",
}


def writes_program(request: ReceivedRequest) -> Response:
    """A policy that writes the program named by the rollout."""
    name = request.headers["X-Session-ID"].partition(".")[0]
    return Response(
        body=answer(request, f"Like this:\n```python\n{PROGRAMS[name]}\n```" if name in PROGRAMS else "no idea")
    )


def test_programs_are_scored_by_what_they_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    results: dict[str, RolloutResult] = {}

    async def main() -> None:
        environment = load_environments({"code": EnvironmentSettings(use="graded_environment:Code")})["code"]
        with serving(writes_program) as server:
            async with stage_of(tmp_path, server.url) as stage:
                for name in ("silent", "right", "wrong", "broken", "endless"):
                    results[name] = await play(stage, environment, 1, attempt_of(name))

    run(main)
    del sys.modules["graded_environment"]
    late = results.pop("endless")
    assert {name: result.reward for name, result in results.items()} == {
        "silent": 0.0,
        "right": 1.0,
        "wrong": pytest.approx(2 / 3),
        "broken": 0.0,
    }
    assert late.policy_error
    assert late.policy_error.startswith("the grader graded_environment:judge did not end within 5 s")
