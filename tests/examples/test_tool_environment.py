import re
import sys
from pathlib import Path

import pytest
from support.engine_clients import attempt_of, run, stage_of
from support.upstream import ReceivedRequest, Response, answer, calling, serving, tool_call

from headpond.config.engine import EnvironmentSettings
from headpond.environments import load_environments
from headpond.playing.rollout import play

EXAMPLES = Path(__file__).parents[2] / "examples"


def looks_up(request: ReceivedRequest) -> Response:
    """A policy that looks up both countries in one turn, one misspelt, then corrects it and names the larger number."""
    countries = re.findall(r"in (\w+)", request.messages[0]["content"])
    results = [message["content"] for message in request.messages if message["role"] == "tool"]
    if not results:
        calls = [tool_call("population", {"country": name}, id=name) for name in (countries[0], countries[1].lower())]
        return Response(body=answer(request, calling(*calls)))
    if len(results) == 2:
        assert results[1].startswith("error: the atlas has no ")
        return Response(body=answer(request, calling(tool_call("population", {"country": countries[1]}))))
    return Response(body=answer(request, f"{countries[int(results[2]) > int(results[0])]}."))


def test_calls_are_counted_and_answers_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)

    async def main() -> None:
        environment = load_environments({"atlas": EnvironmentSettings(use="tool_environment:Atlas")})["atlas"]
        with serving(looks_up) as server:
            async with stage_of(tmp_path, server.url) as stage:
                results = [await play(stage, environment, n, attempt_of(f"r{n}")) for n in range(environment.size)]
        assert [result.reward for result in results] == [1.0] * 6
        assert {(result.metrics["calls"], result.metrics["wrong_calls"], result.turns) for result in results} == {
            (3.0, 1.0, 3)
        }
        assert all(len(result.sample_lengths) == 1 for result in results)

    run(main)
    del sys.modules["tool_environment"]
