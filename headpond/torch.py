"""A trainer's part in torch: tensors of micro-batches, logprobs of their tokens, the clipped
objective, alignment with the engine, and replay of routed experts. Needs torch, which
`import headpond` does not.

Every tensor is [rows, length] and aligned with `input_ids`: the value of a token is at the
token's own index.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any

import numpy as np

from headpond.batches.manifest import PADDING, RECORDED, TOKEN_COLUMNS, UNRECORDED, Array
from headpond.batches.reader import MicroBatch
from headpond.errors import BatchError

torch: Any = import_module("torch")
Tensor = Any
"""A `torch.Tensor`; the type checker has no torch."""

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
# Transformers 5 ends the names of routers with this. They return (logits, weights, expert ids).
ROUTER = "TopKRouter"


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The columns of a micro-batch. Padding has loss mask, weight and advantage 0."""

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    """`padded`: 1 for tokens, [rows, length]. `packed`: which token attends to which, bool [1,
    1, length, length]."""
    loss_mask: Tensor
    loss_weights: Tensor
    logprobs: Tensor
    """The engine's logprobs, from the policy that sampled."""
    advantages: Tensor
    temperatures: Tensor
    versions: Tensor
    version_exact: Tensor
    sampling: Tensor
    index: Array
    """Position of each token in the micro-batch; -1 for padding that the micro-batch does not
    have."""
    micro_batch: MicroBatch

    def model_inputs(self) -> dict[str, Tensor]:
        """Return the arguments for the forward pass of a Hugging Face model."""
        return {name: getattr(self, name) for name in ("input_ids", "position_ids", "attention_mask")}

    def flat(self, values: Tensor) -> Array:
        """Return one value for each token of the micro-batch, the input of `reader.annotate`."""
        column, present = np.zeros(self.micro_batch.input_ids.size, np.float32), self.index >= 0
        column[self.index[present]] = values.detach().float().cpu().numpy()[present]
        return column

    def to(self, device: Any) -> "Tensors":
        moved = {tensor_field.name: getattr(self, tensor_field.name) for tensor_field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in moved.items() if hasattr(value, "to")})


def padded(micro_batch: MicroBatch, device: Any = None) -> Tensors:
    """Lay out one row per sample, padded on the right. A filler has only its padding."""
    bounds = micro_batch.cu_seqlens[: max(1, len(micro_batch.samples)) + 1]
    lengths = np.diff(bounds)
    places = np.arange(lengths.max())[None, :]
    index = np.where(places < lengths[:, None], bounds[:-1, None] + places, -1)
    return _tensors(micro_batch, index, torch.from_numpy((index >= 0).astype(np.int64)), device)


def packed(micro_batch: MicroBatch, device: Any = None) -> Tensors:
    """Lay out all samples in one row. A token attends to the earlier tokens of its own sample."""
    tokens = micro_batch.input_ids.size
    segment = np.repeat(np.arange(micro_batch.cu_seqlens.size - 1), np.diff(micro_batch.cu_seqlens))
    sees = np.tril(segment[:, None] == segment[None, :])
    return _tensors(micro_batch, np.arange(tokens)[None, :], torch.from_numpy(sees[None, None]), device)


def _tensors(micro_batch: MicroBatch, index: Array, attention_mask: Tensor, device: Any) -> Tensors:
    columns: dict[str, Tensor] = {}
    for name, dtype in TOKEN_COLUMNS.items():
        values = np.where(index >= 0, getattr(micro_batch, name)[index], dtype.type(PADDING.get(name, 0)))
        columns[name] = torch.from_numpy(values.astype(np.int64 if dtype.kind in "iu" else np.float32))
    tensors = Tensors(**columns, attention_mask=attention_mask, index=index, micro_batch=micro_batch)
    return tensors if device is None else tensors.to(device)


def token_logprobs(logits: Tensor, tensors: Tensors, *, at_temperature: bool = True) -> Tensor:
    """Return each token's log-probability given the earlier ones; 0 for the first token of a
    sample. The distribution is the one that it was drawn from: at its temperature, and among the
    recorded tokens that truncation left. Pass `at_temperature=False` with
    `engine.logprobs_mode = "raw"`."""
    scaled = logits[:, :-1].float()
    if at_temperature:
        # Greedy tokens have temperature 0 and probability 1 under any scale. They are scaled by 1.
        temperatures = torch.where(tensors.temperatures > 0, tensors.temperatures, 1.0)
        scaled = scaled / temperatures[:, 1:, None]
    token_ids = tensors.input_ids[:, 1:, None]
    normaliser = scaled.logsumexp(-1)
    rows, columns = np.nonzero((tensors.sampling[:, 1:] == RECORDED).cpu().numpy())
    if rows.size:
        normaliser = normaliser.clone()
        normaliser[rows, columns] = _over_support(scaled[rows, columns], tensors, rows, columns + 1)
    result = scaled.gather(-1, token_ids)[..., 0] - normaliser
    result = torch.where(tensors.position_ids[:, 1:] > 0, result, 0.0)
    return torch.nn.functional.pad(result, (1, 0))


def _over_support(scaled: Tensor, tensors: Tensors, rows: Array, columns: Array) -> Tensor:
    """Return the logsumexp of each token's logits over the tokens that it was drawn from."""
    support = tensors.micro_batch.sampling_support()
    allowed = torch.zeros(scaled.shape, dtype=torch.bool)
    for number, token in enumerate(tensors.index[rows, columns].tolist()):
        allowed[number, support.ids[slice(*support.offsets[token : token + 2])].astype(np.int64)] = True
    return scaled.masked_fill(~allowed.to(scaled.device), float("-inf")).logsumexp(-1)


def clipped_objective(
    logprobs: Tensor, tensors: Tensors, denominator: float, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """Return the loss of one micro-batch: PPO's clipped surrogate with the batch's weights, over
    `batch.totals.denominator`. The gradients of all micro-batches and ranks add up to the whole
    step's."""
    ratio = (logprobs - tensors.logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * tensors.advantages, clipped * tensors.advantages)
    return -(tensors.loss_weights * surrogate).sum() / denominator


@dataclass
class Alignment:
    """Distance of the trainer's logprobs from the engine's. Only trained tokens whose version is
    exact and whose sampling is known count. Their version is the batch's: compare with the
    weights of the same version."""

    tokens: int = 0
    kl: float = 0.0
    """Mean of exp(d) - d - 1 with d = trainer - engine, which estimates KL(engine, trainer)."""
    max: float = 0.0
    """Largest |d|."""
    by_version: dict[int, "Alignment"] = field(default_factory=dict[int, "Alignment"])

    def add(self, logprobs: Tensor, tensors: Tensors) -> None:
        """Add the tokens of a micro-batch."""
        compared = (tensors.loss_mask > 0) & (tensors.version_exact > 0) & (tensors.sampling != UNRECORDED)
        differences = (logprobs.detach() - tensors.logprobs)[compared].double()
        versions = tensors.versions[compared]
        self._take(differences)
        for version in versions.unique().tolist():
            self.by_version.setdefault(version, Alignment())._take(differences[versions == version])

    def _take(self, differences: Tensor) -> None:
        count = len(differences)
        if not count:
            return
        kl = float((differences.exp() - differences - 1).sum())
        self.kl = (self.kl * self.tokens + kl) / (self.tokens + count)
        self.tokens += count
        self.max = max(self.max, float(differences.abs().max()))


def routed_experts(tensors: Tensors) -> Tensor:
    """Return recorded expert ids [rows * length, layers, top-k]; -1 where the engine sent none."""
    rows = tensors.micro_batch.routed_experts(missing=-1)[tensors.index]
    rows[tensors.index < 0] = -1
    return torch.from_numpy(rows.reshape(-1, *rows.shape[2:]).astype(np.int64)).to(tensors.input_ids.device)


@contextlib.contextmanager
def replayed_routing(model: Any, tensors: Tensors) -> Iterator[None]:
    """Route the tokens of forward passes inside the block as the engine did. The weights come
    from the model's router for these experts: gradients reach it. The model routes tokens
    without a recorded row."""
    routers = [
        (int(match[1]), module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith(ROUTER) and (match := LAYER.search(f".{name}."))
    ]
    if not routers:
        raise BatchError(f"the model has no module whose class ends with {ROUTER}: routing cannot be replayed")
    experts = routed_experts(tensors)
    hooks = [module.register_forward_hook(_replaying(experts[:, layer])) for layer, module in routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _replaying(experts: Tensor) -> Callable[[Any, Any, Any], tuple[Tensor, Tensor, Tensor]]:
    def hook(module: Any, _: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, router_choice = output
        chosen = torch.where(experts >= 0, experts.to(router_choice.device), router_choice)
        probabilities = logits.softmax(-1, dtype=torch.float).gather(-1, chosen)
        if getattr(module, "norm_topk_prob", True):
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return logits, probabilities.to(weights.dtype), chosen

    return hook
