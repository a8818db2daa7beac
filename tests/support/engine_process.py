"""Engines as processes, requests that return the raw bytes, control endpoints and the weights that they load."""

import http.client
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from headpond.demo import tiny_moe
from support.cluster import Process
from support.waiting import HANG_S, wait_until

HEADPOND = str(Path(sys.executable).parent / "headpond")
CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
READY = re.compile(r"action=engine_ready url=http://([\d.]+):(\d+)")

RECORDED_FIELDS: dict[str, dict[str, Any]] = {
    "vllm": {"logprobs": True, "return_token_ids": True},
    "sglang": {
        "logprobs": True,
        "return_prompt_token_ids": True,
        "return_meta_info": True,
        "return_routed_experts": True,
    },
}
"""Request fields for everything that is recorded, by dialect."""


class EngineProcess(Process):
    def __init__(self, directory: Path, *arguments: str) -> None:
        name = f"engine-{len(list(directory.iterdir()))}"
        super().__init__(name, [HEADPOND, "engine", "--port", "0", *arguments], dict(os.environ), directory)

    @property
    def address(self) -> tuple[str, int]:
        """Waits until the engine listens."""
        match = wait_until(lambda: READY.search(self.text) or self.exit_code is not None)
        assert isinstance(match, re.Match), f"the engine ended:\n{self.text}"
        return match[1], int(match[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=HANG_S)

    def request(self, path: str, request: Any = None, *, method: str = "POST", **headers: str) -> tuple[int, bytes]:
        """Status and body; a request that is not bytes is sent as JSON."""
        body = request if isinstance(request, bytes) or request is None else json.dumps(request).encode()
        with closing(self.connect()) as connection:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            response = connection.getresponse()
            return response.status, response.read()

    def answer(self, path: str, request: Any, **headers: str) -> bytes:
        status, body = self.request(path, request, **headers)
        assert status == 200, body
        return body


@contextmanager
def running(directory: Path, *arguments: str) -> Iterator[EngineProcess]:
    engine = EngineProcess(directory, *arguments)
    try:
        yield engine
    finally:
        engine.end()


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def write_weights(directory: Path, version: int, model: tiny_moe.Weights | None = None) -> Path:
    path = directory / "weights" / f"version_{version}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "weights.json").write_text(json.dumps({"version": version}))
    if model is not None:
        tiny_moe.save(path, model)
    return path


def control(engine: EngineProcess, path: str, body: Any = None) -> Any:
    return json.loads(engine.answer(path, body))


def control_get(engine: EngineProcess, path: str) -> Any:
    status, body = engine.request(path, method="GET")
    assert status == 200
    return json.loads(body)


def update_vllm(engine: EngineProcess, directory: Path, version: int, model: tiny_moe.Weights | None = None) -> None:
    weights = write_weights(directory, version, model)
    assert control(engine, "/pause?mode=keep") == {"status": "paused"}
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    assert control(engine, "/collective_rpc", rpc) == {"results": [None]}
    assert control(engine, "/update_weight_version", {"new_version": str(version)})["success"]
    assert control(engine, "/resume") == {"status": "resumed"}


def update_sglang(engine: EngineProcess, directory: Path, version: int) -> None:
    weights = write_weights(directory, version)
    assert control(engine, "/pause_generation", {"mode": "in_place"})["status"] == "ok"
    body = {"model_path": str(weights), "weight_version": str(version)}
    assert control(engine, "/update_weights_from_disk", body)["success"]
    assert control(engine, "/continue_generation", {})["status"] == "ok"


def in_flight(engine: EngineProcess, count: int = 1) -> None:
    def running_requests() -> bool:
        _, metrics = engine.request("/metrics", method="GET")
        lines = metrics.decode().splitlines()
        return any(line.endswith(f" {count}.0") and "running" in line for line in lines)

    wait_until(running_requests)


def sent(engine: EngineProcess, path: str, body: Any) -> Future[dict[str, Any]]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(lambda: json.loads(engine.answer(path, body)))
    pool.shutdown(wait=False)
    return future
