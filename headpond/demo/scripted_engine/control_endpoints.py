"""The control endpoints of vLLM (`VLLM_SERVER_DEV_MODE=1`, 0.32) and SGLang (0.5.23), over the engine's `Weights`."""

import time
from typing import Any

import orjson
from aiohttp import web

from headpond.demo.scripted_engine.options import Dialect
from headpond.demo.scripted_engine.served_weights import ABORT, KEEP, WAIT, Weights
from headpond.errors import BadRequest

STARTED_AT = time.time()
SGLANG_MODES = {"abort": ABORT, "retract": KEEP, "in_place": KEEP}


class ControlEndpoints:
    def __init__(self, weights: Weights, dialect: Dialect) -> None:
        self._weights = weights
        self._dialect = dialect

    def routes(self) -> list[web.RouteDef]:
        if self._dialect == "sglang":
            return [
                web.get("/model_info", self._model_info),
                web.get("/metrics", self._metrics),
                web.post("/pause_generation", self._pause_generation),
                web.post("/continue_generation", self._continue_generation),
                web.post("/abort_request", self._abort_request),
                web.post("/flush_cache", self._flush_cache),
                web.post("/update_weight_version", self._update_weight_version),
                web.post("/update_weights_from_disk", self._update_weights_from_disk),
                web.post("/load_lora_adapter", self._load_adapter),
                web.post("/unload_lora_adapter", self._unload_adapter),
            ]
        return [
            web.get("/weight_info", self._weight_info),
            web.get("/metrics", self._metrics),
            web.get("/is_paused", self._is_paused),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.post("/abort_requests", self._abort_requests),
            web.post("/collective_rpc", self._collective_rpc),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            web.post("/update_weight_version", self._update_weight_version),
            web.post("/v1/load_lora_adapter", self._load_adapter),
            web.post("/v1/unload_lora_adapter", self._unload_adapter),
        ]

    # vLLM

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._weights.state.label})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._weights.paused})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", ABORT)
        if mode not in (ABORT, WAIT, KEEP):
            raise BadRequest(f"mode {mode!r}: use abort, wait or keep")
        await self._weights.pause(mode)
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self._weights.resume()
        return web.json_response({"status": "resumed"})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        aborted = self._weights.abort((await _json(request)).get("request_ids") or None)
        return web.json_response({"status": "aborted", "aborted": aborted})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        match await _json(request):
            case {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}:
                try:
                    self._weights.load(directory)
                except BadRequest as error:  # as an exception of a worker
                    raise web.HTTPInternalServerError(text=str(error)) from error
            case _:
                raise BadRequest("only reload_weights with kwargs.weights_path is there")
        return web.json_response({"results": [None]})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Held requests keep their blocks unless they are reset too."""
        held = bool(self._weights.flights) and request.query.get("reset_running_requests") != "true"
        return web.json_response({"success": not held})

    # SGLang

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": "scripted", "is_generation": True, "weight_version": self._weights.state.label}
        )

    async def _pause_generation(self, request: web.Request) -> web.Response:
        mode = (await _json(request)).get("mode", "abort")
        if mode not in SGLANG_MODES:
            raise BadRequest(f"mode {mode!r}: use {', '.join(SGLANG_MODES)}")
        await self._weights.pause(SGLANG_MODES[mode])
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, _: web.Request) -> web.Response:
        self._weights.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await _json(request)
        self._weights.abort(None if body.get("abort_all") else [str(body.get("rid"))])
        return web.Response()

    async def _flush_cache(self, _: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await _json(request)
        try:
            self._weights.load(str(body.get("model_path")), body.get("weight_version"))
        except BadRequest as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        answer = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        return web.json_response(answer)

    # both

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await _json(request)
        new = body.get("new_version")
        if not isinstance(new, str):
            raise BadRequest("new_version must be a string")
        if self._dialect == "sglang" and body.get("abort_all_requests", True):
            self._weights.abort(None)
        self._weights.rename(new)
        return web.json_response({"success": True, "new_version": new})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await _json(request)
        name = str(body.get("lora_name"))
        if name in self._weights.adapters:
            raise BadRequest(f"The lora adapter '{name}' has already been loaded.")
        self._weights.load_adapter(name, str(body.get("lora_path")))
        if self._dialect == "sglang":
            return web.json_response({"success": True, "loaded_adapters": {}})
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = str((await _json(request)).get("lora_name"))
        self._weights.unload_adapter(name)
        if self._dialect == "sglang":
            return web.json_response({"success": True, "loaded_adapters": {}})
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _metrics(self, _: web.Request) -> web.Response:
        running, waiting = len(self._weights.flights), self._weights.waiting
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        if self._dialect == "sglang":
            names = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
        lines = [
            f'{name}{{model_name="scripted"}} {value:.1f}'
            for name, value in zip(names, (running, waiting), strict=True)
        ]
        if self._dialect != "sglang":
            lines.append(f"process_start_time_seconds {STARTED_AT}")
        return web.Response(text="\n".join([*lines, ""]))


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read() or b"{}")
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request cannot be read: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the request cannot be read: send a JSON object")
    return body
