"""The commands of docs/engines.md that update weights, run against engines that speak as vLLM and SGLang do.

tests/vllm runs those of vLLM against a real one.
"""

import subprocess
from pathlib import Path

import pytest
from support.engine_process import running, write_weights
from support.vllm_server import DOCUMENTED_URL, filled, update_commands


@pytest.mark.parametrize(("dialect", "url"), [("vllm", DOCUMENTED_URL), ("sglang", "http://127.0.0.1:30000")])
def test_the_documented_update_loads_and_names_the_weights(tmp_path: Path, dialect: str, url: str) -> None:
    commands = update_commands(url)
    assert len(commands) >= 4
    with running(tmp_path, "--dialect", dialect) as engine:
        host, port = engine.address
        replaced = {url: f"http://{host}:{port}", "/weights/7": str(write_weights(tmp_path, 7))}
        said = [subprocess.run(filled(command, replaced), capture_output=True, text=True) for command in commands]
    assert [done.returncode for done in said] == [0] * len(commands), said
    assert not any('"success": false' in done.stdout for done in said)
    assert '"weight_version": "7"' in said[-1].stdout
