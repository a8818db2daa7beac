"""The control endpoints of a server as data: which calls tell its weights' version, and which load others."""

from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, kw_only=True)
class Call:
    """A POST. An answer with another status than 200, or with `"success": false`, is a refusal."""

    path: str
    body: Any = None
    may_be_early: bool = False
    """Whether the server refuses until requests have let go of what they hold: repeated a few times."""


class ControlCalls:
    """A server that says nothing of its weights and loads none. Subclassed for each server; stateless."""

    version_paths: tuple[str, ...] = ()
    """GET, the first one that answers is used from then on."""
    hint: str = 'Set engine.weight_update = "trainer": this dialect has no calls that load weights'
    """What to do if the server does not have an endpoint."""

    def read_version(self, body: bytes) -> str | None:
        """The weights' name in the answer of a version path."""
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            return None
        stated = answer.get("weight_version") if isinstance(answer, dict) else None
        return None if stated is None else str(stated)

    def pause(self, label: str) -> list[Call]:
        """Hold requests without ending them, then name the weights `label`."""
        return [Call(path="/")]

    def load(self, weights: str, label: str) -> list[Call]:
        """Load, drop what was cached with other weights, name the new ones."""
        return []

    def resume(self, label: str | None) -> list[Call]:
        """Generate on; first name the weights, unless `label` is None."""
        return []

    # LoRA adapters: each version is loaded beside the others, under a name of its own, and requests name it as model.

    models_path: str = "/v1/models"
    """GET: the names of the loaded adapters are among its ids."""

    def read_adapters(self, body: bytes) -> list[str]:
        """The ids that the server lists, the last loaded last."""
        try:
            answer = orjson.loads(body)
            return [str(model["id"]) for model in answer["data"]]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return []

    def load_adapter(self, name: str, weights: str) -> list[Call]:
        return [Call(path="/")]

    def unload_adapter(self, name: str) -> list[Call]:
        return []

    def adapter_model(self, model: str, name: str) -> str:
        """What a request names as its model."""
        return name


class VllmCalls(ControlCalls):
    """vLLM 0.30 with VLLM_SERVER_DEV_MODE=1."""

    version_paths = ("/weight_info",)
    hint = "Start vLLM 0.30 or later with VLLM_SERVER_DEV_MODE=1"

    def pause(self, label: str) -> list[Call]:
        return [Call(path="/pause?mode=keep"), self._name(label)]

    def load(self, weights: str, label: str) -> list[Call]:
        """Held requests have their cached prefix computed again: else they, and every request with that prefix, would
        mix keys and values of both versions."""
        return [
            Call(path="/collective_rpc", body={"method": "reload_weights", "kwargs": {"weights_path": weights}}),
            Call(path="/reset_prefix_cache?reset_running_requests=true", may_be_early=True),
            self._name(label),
        ]

    def resume(self, label: str | None) -> list[Call]:
        return [*([self._name(label)] if label else []), Call(path="/resume")]

    def load_adapter(self, name: str, weights: str) -> list[Call]:
        """With VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""
        return [Call(path="/v1/load_lora_adapter", body={"lora_name": name, "lora_path": weights})]

    def unload_adapter(self, name: str) -> list[Call]:
        return [Call(path="/v1/unload_lora_adapter", body={"lora_name": name})]

    @staticmethod
    def _name(label: str) -> Call:
        return Call(path="/update_weight_version", body={"new_version": label})


class SglangCalls(ControlCalls):
    """SGLang 0.5.13 or later."""

    version_paths = ("/model_info", "/get_model_info", "/get_weight_version")
    hint = "Update SGLang to 0.5.13 or later"

    def pause(self, label: str) -> list[Call]:
        """Retracted requests start over from their tokens, with nothing cached."""
        return [Call(path="/pause_generation", body={"mode": "retract"}), self._name(label)]

    def load(self, weights: str, label: str) -> list[Call]:
        body = {"model_path": weights, "weight_version": label, "flush_cache": True, "abort_all_requests": False}
        return [Call(path="/update_weights_from_disk", body=body)]

    def resume(self, label: str | None) -> list[Call]:
        return [*([self._name(label)] if label else []), Call(path="/continue_generation", body={})]

    def load_adapter(self, name: str, weights: str) -> list[Call]:
        return [Call(path="/load_lora_adapter", body={"lora_name": name, "lora_path": weights})]

    def unload_adapter(self, name: str) -> list[Call]:
        return [Call(path="/unload_lora_adapter", body={"lora_name": name})]

    def adapter_model(self, model: str, name: str) -> str:
        return f"{model}:{name}"

    @staticmethod
    def _name(label: str) -> Call:
        """By default SGLang ends every request here."""
        return Call(path="/update_weight_version", body={"new_version": label, "abort_all_requests": False})
