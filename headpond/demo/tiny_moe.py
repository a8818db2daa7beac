"""A mixture-of-experts language model in NumPy that learns small tasks within a minute, for the demo and the tests.

The next token's logits are a function of the last tokens (the window). `headpond engine --model tiny-moe` samples from
it, `examples/numpy_trainer.py` trains it. Weights are arrays by name; functions keep their dtype, so that gradients can
be checked in float64. 79,000 parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headpond.errors import ConfigError
from headpond.store import atomic, tensors

Array = NDArray[Any]
Weights = dict[str, Array]

NAME = "tiny-moe"
FILE = "model.safetensors"
# Bytes, and the two ends of a message, like the renderer bytes-chatml.
VOCABULARY = 258
MESSAGE_END = 257
# Stands in a window for each place before the first token.
BEFORE = VOCABULARY
# Tokens. A question's ChatML has 13 behind its text.
WINDOW = 32
EMBEDDING, HIDDEN, LAYERS, EXPERTS, TOPK, EXPERT_HIDDEN = 12, 64, 2, 8, 2, 16
# Untrained weights write these tokens, instead of pretraining: a reward is too rare among 258 equally likely tokens.
FIRST_WORDS = b"1234"
# First logit of all other tokens, and the size of their embeddings: questions differ more than they agree.
UNLIKELY, OTHERS = -8.0, 0.1
END_LOGIT = 0.5


def initial_weights(seed: int) -> Weights:
    """The same in every process."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> Array:
        return (scale * generator.standard_normal(shape)).astype(np.float32)

    words = [*FIRST_WORDS, MESSAGE_END]
    embedding = normal(VOCABULARY + 1, EMBEDDING, scale=1.0)
    embedding[np.setdiff1d(np.arange(VOCABULARY + 1), words)] *= OTHERS
    weights = {
        "embedding": embedding,
        "input.weight": normal(WINDOW * EMBEDDING, HIDDEN, scale=EMBEDDING**-0.5),
        "input.bias": np.zeros(HIDDEN, np.float32),
    }
    inner = EXPERTS * EXPERT_HIDDEN
    for layer in range(LAYERS):
        weights |= {
            f"layers.{layer}.router": normal(HIDDEN, EXPERTS, scale=HIDDEN**-0.5),
            f"layers.{layer}.up": normal(HIDDEN, inner, scale=HIDDEN**-0.5),
            f"layers.{layer}.up_bias": np.zeros(inner, np.float32),
            f"layers.{layer}.down": normal(inner, HIDDEN, scale=EXPERT_HIDDEN**-0.5),
        }
    bias = np.full(VOCABULARY, UNLIKELY, np.float32)
    bias[[*FIRST_WORDS]], bias[MESSAGE_END] = 0.0, END_LOGIT
    return weights | {"output.weight": normal(HIDDEN, VOCABULARY, scale=0.3 * HIDDEN**-0.5), "output.bias": bias}


def save(directory: Path, weights: Weights) -> None:
    """Write the weights. The same weights give the same bytes; leftovers of a killed writer are overwritten."""
    atomic.write_durably(directory / FILE, tensors.to_bytes(weights, {}), suffix="tmp")


def load(directory: Path) -> Weights:
    """ConfigError if there is no such model."""
    try:
        content = np.frombuffer((directory / FILE).read_bytes(), np.uint8)
        weights = dict(tensors.parse(content).arrays)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot load a model from {directory}: {type(error).__name__}: {error}") from None
    if {name: array.shape for name, array in weights.items()} != _shapes():
        raise ConfigError(f"{directory / FILE} is not a {NAME} model")
    return weights


@cache
def _shapes() -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in initial_weights(0).items()}


@dataclass(frozen=True, kw_only=True)
class LayerPass:
    """Values of one layer for the gradient."""

    input: Array
    routes: Array  # [rows, TOPK]
    shares: Array  # shares of the routed experts; their sum is 1
    gates: Array  # [rows, EXPERTS]: the shares, 0 elsewhere
    before: Array
    sigmoid: Array
    active: Array  # [rows, EXPERTS, EXPERT_HIDDEN]
    gated: Array


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    windows: Array
    embedded: Array
    first: Array
    layers: list[LayerPass]
    hidden: Array

    @property
    def routes(self) -> Array:
        """[rows, LAYERS, TOPK], uint8"""
        return np.stack([layer.routes for layer in self.layers], axis=1).astype(np.uint8)


def forward(weights: Mapping[str, Array], windows: Array, routes: Array | None = None) -> ForwardPass:
    """`routes` [rows, LAYERS, TOPK] replays the experts of an earlier pass; where they are negative, and without them,
    the router chooses."""
    embedded = weights["embedding"][windows].reshape(len(windows), -1)
    first = hidden = np.tanh(embedded @ weights["input.weight"] + weights["input.bias"])
    layers: list[LayerPass] = []
    for number in range(LAYERS):
        layer = _layer(weights, f"layers.{number}", hidden, None if routes is None else routes[:, number])
        hidden = hidden + layer.gated @ weights[f"layers.{number}.down"]
        layers.append(layer)
    return ForwardPass(windows=windows, embedded=embedded, first=first, layers=layers, hidden=hidden)


def _layer(weights: Mapping[str, Array], name: str, hidden: Array, replayed: Array | None) -> LayerPass:
    """All experts are computed, in one product: at this size that takes less time than selecting."""
    scores = hidden @ weights[f"{name}.router"]
    routes = np.argsort(-scores, axis=1)[:, :TOPK]
    if replayed is not None:
        routes = np.where(replayed < 0, routes, replayed).astype(np.int64)
    shares = np.exp(log_softmax(np.take_along_axis(scores, routes, axis=1)))
    gates = np.zeros_like(scores)
    np.put_along_axis(gates, routes, shares, axis=1)
    before = hidden @ weights[f"{name}.up"] + weights[f"{name}.up_bias"]
    sigmoid = 1 / (1 + np.exp(-before))
    active = (before * sigmoid).reshape(len(hidden), EXPERTS, EXPERT_HIDDEN)
    gated = (active * gates[:, :, None]).reshape(before.shape)
    return LayerPass(
        input=hidden,
        routes=routes,
        shares=shares,
        gates=gates,
        before=before,
        sigmoid=sigmoid,
        active=active,
        gated=gated,
    )


def logits(weights: Mapping[str, Array], hidden: Array) -> Array:
    return hidden @ weights["output.weight"] + weights["output.bias"]


def log_softmax(values: Array) -> Array:
    shifted = values - values.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def gradient(weights: Mapping[str, Array], passed: ForwardPass, of_logits: Array) -> Weights:
    """The gradient of each weight, from that of the logits. The chosen experts are constants, as in router replay."""
    found: Weights = {"output.weight": passed.hidden.T @ of_logits, "output.bias": of_logits.sum(axis=0)}
    of_hidden = of_logits @ weights["output.weight"].T
    for number in reversed(range(LAYERS)):
        of_hidden = _layer_gradient(weights, f"layers.{number}", passed.layers[number], of_hidden, found)
    of_first = of_hidden * (1 - passed.first**2)
    found["input.weight"] = passed.embedded.T @ of_first
    found["input.bias"] = of_first.sum(axis=0)
    found["embedding"] = np.zeros_like(weights["embedding"])
    of_embedded = of_first @ weights["input.weight"].T
    np.add.at(found["embedding"], passed.windows, of_embedded.reshape(*passed.windows.shape, -1))
    return found


def _layer_gradient(
    weights: Mapping[str, Array], name: str, layer: LayerPass, of_hidden: Array, found: Weights
) -> Array:
    """Adds the layer's gradients to `found` and returns that of its input."""
    of_gated = of_hidden @ weights[f"{name}.down"].T
    by_expert = of_gated.reshape(layer.active.shape)
    of_shares = np.take_along_axis((by_expert * layer.active).sum(axis=2), layer.routes, axis=1)
    of_chosen = layer.shares * (of_shares - (layer.shares * of_shares).sum(axis=1, keepdims=True))
    of_scores = np.zeros_like(layer.gates)
    np.put_along_axis(of_scores, layer.routes, of_chosen, axis=1)
    slope = layer.sigmoid * (1 + layer.before * (1 - layer.sigmoid))
    of_before = (by_expert * layer.gates[:, :, None]).reshape(layer.before.shape) * slope
    found[f"{name}.down"] = layer.gated.T @ of_hidden
    found[f"{name}.up"] = layer.input.T @ of_before
    found[f"{name}.up_bias"] = of_before.sum(axis=0)
    found[f"{name}.router"] = layer.input.T @ of_scores
    return of_hidden + of_before @ weights[f"{name}.up"].T + of_scores @ weights[f"{name}.router"].T
