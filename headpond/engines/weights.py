"""An engine's weights: the labels of their versions, and the calls that read and load them.

vLLM and SGLang keep a free text as label: `7` if the trainer sets it, `7@RUN` if the run does. A
text that is not a version names the weights that the server started with (both begin with
`default`).
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import orjson

from headpond.errors import Upstream
from headpond.turn import VersionSpan

MAX_VERSION = 2**31 - 1  # Versions are stored as i32.
START_VERSION = 0  # Version of the weights that a server started with.
LOADING, FAILED = "loading", "failed"
LABEL = re.compile(rf"(?:({LOADING}|{FAILED}) )?([0-9]{{1,10}})(?:@([A-Za-z0-9_-]{{1,100}}))?", re.ASCII)
Version = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]


@dataclass(frozen=True)
class WeightLabel:
    text: str
    version: int = START_VERSION
    # Whether the text names a version. If not, nothing was loaded since the server started.
    numbered: bool = False
    run: str | None = None  # The run that loaded the weights, if it did so itself.
    # `loading` or `failed` if the weights may be of two versions at once. None of their
    # samples are trained on.
    unfit: str | None = None

    @classmethod
    def parse(cls, text: str) -> "WeightLabel":
        match = LABEL.fullmatch(text)
        if match is None or int(match[2]) > MAX_VERSION:
            return cls(text)
        return cls(text, int(match[2]), numbered=True, run=match[3], unfit=match[1])


def label_of(version: int, run: str, *, state: str | None = None) -> str:
    return f"{state} {version}@{run}" if state else f"{version}@{run}"


class LabelSpan(msgspec.Struct):
    """An entry of `weight_versions`: tokens `[start, end)` of the completion."""

    version: str | Version
    start: int
    end: int


def read_label(stated: str | int | None) -> int | None:
    """The version that a response names; None if it names none. Upstream if its tokens cannot be trained on."""
    label = WeightLabel.parse("" if stated is None else str(stated))
    if label.unfit:
        raise Upstream(f"the engine sampled with weights that it calls {label.text!r}: they were not loaded completely")
    return label.version if label.numbered else None


def read_spans(spans: list[LabelSpan] | None) -> tuple[VersionSpan, ...]:
    """The versions that sampled a completion; empty if the response names none. `read_turn` checks their bounds."""
    versions = [read_label(span.version) for span in spans or ()]
    if all(version is None for version in versions):
        return ()
    return tuple(
        VersionSpan(version=START_VERSION if version is None else version, start=span.start, end=span.end)
        for version, span in zip(versions, spans or (), strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Call:
    """A POST. An answer with another status than 200, or with `"success": false`, is a refusal."""

    path: str
    body: Any = None
    # Whether the server refuses while requests still hold resources. The call is then
    # repeated a few times.
    may_be_early: bool = False


class ControlCalls:
    """A server that reports no weights and loads none. Each server has a subclass. Stateless."""

    # GET paths. The first one that answers is used from then on.
    version_paths: tuple[str, ...] = ()
    # The remedy if the server lacks an endpoint.
    hint: str = 'Set engine.weight_update = "trainer": this dialect has no calls that load weights'

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
        """Load weights, drop the cache of the old ones, and name the new ones."""
        return []

    def resume(self, label: str | None) -> list[Call]:
        """Generate on. Name the weights first, unless `label` is None."""
        return []

    # LoRA adapters: each version is loaded beside the others, under a name of its own, and requests name it as model.

    models_path: str = "/v1/models"  # GET path. The names of the loaded adapters are among its ids.

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
        """The model name of a request that uses the adapter."""
        return name


class VllmCalls(ControlCalls):
    """vLLM 0.30 with VLLM_SERVER_DEV_MODE=1."""

    version_paths = ("/weight_info",)
    hint = "Start vLLM 0.30 or later with VLLM_SERVER_DEV_MODE=1"

    def pause(self, label: str) -> list[Call]:
        return [Call(path="/pause?mode=keep"), self._name(label)]

    def load(self, weights: str, label: str) -> list[Call]:
        """Load weights. Held requests compute their cached prefix again.

        Otherwise they, and every request with that prefix, would mix keys and values of both
        versions.
        """
        return [
            Call(path="/collective_rpc", body={"method": "reload_weights", "kwargs": {"weights_path": weights}}),
            Call(path="/reset_prefix_cache?reset_running_requests=true", may_be_early=True),
            self._name(label),
        ]

    def resume(self, label: str | None) -> list[Call]:
        return [*([self._name(label)] if label else []), Call(path="/resume")]

    def load_adapter(self, name: str, weights: str) -> list[Call]:
        """Load an adapter. The server must run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""
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
        """Pause in mode `retract`: the requests start over from their tokens, with nothing cached."""
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
        """Name the weights without aborting: by default SGLang ends every request here."""
        return Call(path="/update_weight_version", body={"new_version": label, "abort_all_requests": False})
