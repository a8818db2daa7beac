"""The control endpoints of engines, called while requests are in flight."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headpond.demo import tiny_moe
from support.engine_process import EngineProcess
from support.waiting import wait_until
from support.weights import write_weights


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
