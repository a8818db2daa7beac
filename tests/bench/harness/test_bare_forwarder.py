import urllib.request
from pathlib import Path

import orjson
import pytest

from headpond.processes.child_process import ChildProcess, listening_port

pytestmark = pytest.mark.slow

ENGINE = ["headpond", "engine", "--port", "0", "--layers", "48", "--form", "object", "--length", "constant:120"]


def answer(port: int, characters: int) -> dict[str, object]:
    request = {"messages": [{"role": "user", "content": "x" * characters}], "logprobs": True, "return_token_ids": True}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, data=orjson.dumps(request | {"seed": 1}))) as response:
        return orjson.loads(response.read())


@pytest.mark.parametrize("characters", [100, 2_000, 46_000])
def test_forwards_the_engine_s_response_without_the_routed_experts(tmp_path: Path, characters: int) -> None:
    engine = ChildProcess("engine", ENGINE, directory=tmp_path, variables={})
    try:
        port = listening_port(engine)
        command = ["python", "-m", "bench.harness.bare_forwarder", str(port), str(tmp_path)]
        forwarder = ChildProcess("forwarder", command, directory=tmp_path, variables={})
        try:
            forwarded = answer(listening_port(forwarder), characters)
        finally:
            forwarder.kill()
        expected = answer(port, characters)
    finally:
        engine.kill()
    experts = expected["choices"][0]["routed_experts"]  # pyright: ignore[reportIndexIssue, reportUnknownVariableType]
    assert len(experts["data"]) > 48 * 8 * characters  # pyright: ignore[reportUnknownArgumentType]
    experts["data"] = ""
    assert forwarded == expected
