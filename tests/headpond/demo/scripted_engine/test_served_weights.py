"""Weights that change while requests are in flight, over the control endpoints of both servers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_process import (
    CHAT,
    GENERATE,
    RECORDED_FIELDS,
    EngineProcess,
    control,
    control_get,
    in_flight,
    running,
    sent,
    update_sglang,
    update_vllm,
    user,
    write_weights,
)

from headpond.demo.scripted_engine.generation import FILLER, shifted
from headpond.renderers import bytes_chatml

HELLO = {"messages": [user("hi")], "seed": 1}
IN_FLIGHT = ("--latency", "constant:600", "--length", "constant:80")
"""Requests that are answered only when a pause ends."""


def filler_versions(ids: list[int], spans: list[dict[str, Any]]) -> bool:
    """Whether the filler of each span is that of its version."""
    text = bytes_chatml.decode(np.resize(FILLER, 2 * len(FILLER)))
    parts = [(np.array(ids[span["start"] : span["end"]], np.int32), int(span["version"])) for span in spans]
    return all(bytes_chatml.decode(shifted(part, -version)) in text for part, version in parts)


def test_generate_names_the_weights_of_every_token(tmp_path: Path) -> None:
    prompt = bytes_chatml.encode([user("hi")]).tolist()
    request = {"token_ids": prompt, "sampling_params": {"logprobs": 1, "seed": 1}}
    with running(tmp_path, *IN_FLIGHT) as engine:
        assert control_get(engine, "/weight_info") == {"weight_version": "default"}
        update_vllm(engine, tmp_path, 6)
        future = sent(engine, GENERATE, request)
        in_flight(engine)
        update_vllm(engine, tmp_path, 7)
        choice = future.result(30)["choices"][0]
        spans, ids = choice["weight_versions"], choice["token_ids"]
        half = len(ids) - len(ids) // 2
        assert spans == [{"version": "6", "start": 0, "end": half}, {"version": "7", "start": half, "end": len(ids)}]
        assert filler_versions(ids[:-1], [spans[0], spans[1] | {"end": len(ids) - 1}])
        assert control_get(engine, "/weight_info") == {"weight_version": "7"}


def test_sglang_names_the_weights_of_every_token(tmp_path: Path) -> None:
    with running(tmp_path, *IN_FLIGHT, "--dialect", "sglang") as engine:
        assert control_get(engine, "/model_info")["weight_version"] == "default"
        future = sent(engine, CHAT, HELLO | RECORDED_FIELDS["sglang"])
        in_flight(engine)
        update_sglang(engine, tmp_path, 1)
        meta_info = future.result(30)["choices"][0]["meta_info"]
        assert [span["version"] for span in meta_info["weight_versions"]] == ["default", "1"]
        assert meta_info["weight_version"] == "1"


def test_a_loaded_version_and_its_name_are_two_things(tmp_path: Path) -> None:
    """An engine whose weights are called by another version than theirs can be told by its tokens."""
    request = {"token_ids": [256, 10], "sampling_params": {"logprobs": 1, "seed": 1}}
    with running(tmp_path, "--length", "constant:40") as engine:
        first = control(engine, GENERATE, request)["choices"][0]
        control(engine, "/update_weight_version", {"new_version": "5"})
        renamed = control(engine, GENERATE, request)["choices"][0]
        assert renamed["token_ids"] == first["token_ids"]
        assert [span["version"] for span in renamed["weight_versions"]] == ["5"]
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(write_weights(tmp_path, 3))}}
        control(engine, "/collective_rpc", rpc)
        loaded = control(engine, GENERATE, request)["choices"][0]
        assert loaded["token_ids"] != first["token_ids"]
        assert [span["version"] for span in loaded["weight_versions"]] == ["5"]


@pytest.mark.parametrize(
    ("dialect", "pause", "resume"),
    [
        ("vllm", lambda engine: control(engine, "/pause"), lambda engine: control(engine, "/resume")),
        (
            "sglang",
            lambda engine: control(engine, "/pause_generation", {}),
            lambda engine: control(engine, "/continue_generation", {}),
        ),
    ],
)
def test_by_default_a_pause_aborts(
    tmp_path: Path, dialect: str, pause: Callable[[EngineProcess], Any], resume: Callable[[EngineProcess], Any]
) -> None:
    with running(tmp_path, *IN_FLIGHT, "--dialect", dialect) as engine:
        future = sent(engine, CHAT, HELLO | RECORDED_FIELDS[dialect])
        in_flight(engine)
        pause(engine)
        choice = future.result(30)["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["logprobs"]["content"]) < 80
        resume(engine)


def test_a_pause_can_wait_for_requests_in_flight(tmp_path: Path) -> None:
    with running(tmp_path, "--latency", "constant:0.3") as engine:
        future = sent(engine, CHAT, HELLO)
        in_flight(engine)
        control(engine, "/pause?mode=wait")
        assert future.done() or future.result(30)["choices"][0]["finish_reason"] == "stop"
        assert control_get(engine, "/is_paused") == {"is_paused": True}
        waiting = sent(engine, CHAT, HELLO)
        control(engine, "/resume")
        assert waiting.result(30)["choices"][0]["finish_reason"] == "stop"


def test_bad_control_requests_are_refused(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        assert engine.request("/pause?mode=later")[0] == 400
        assert engine.request("/update_weight_version", {"new_version": 7})[0] == 400
        assert engine.request("/update_weight_version", b"[")[0] == 400
        missing = {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}
        status, body = engine.request("/collective_rpc", missing)
        assert (status, b"cannot load weights from /nowhere" in body) == (500, True)
        assert engine.request("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"})[0] == 400
        assert engine.request("/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 400
    with running(tmp_path, "--no-dev-mode") as engine:
        assert engine.request("/weight_info", method="GET")[0] == 404


def test_a_restarted_engine_has_its_first_weights(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        update_vllm(engine, tmp_path, 4)
        port = str(engine.address[1])
    with running(tmp_path, "--port", port) as engine:
        assert control_get(engine, "/weight_info") == {"weight_version": "default"}
