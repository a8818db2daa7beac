"""headpond.torch against Hugging Face models and plain arithmetic. Run by `make test-torch`."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.torch_batches import EXPERTS, VOCABULARY, model_of, sealed

from headpond.batches import Batch, MicroBatch
from headpond.batches.reader import SamplingSupport
from headpond.torch import Alignment, clipped_objective, packed, padded, replayed_routing, token_logprobs


def one_by_one(model: Any, micro_batch: MicroBatch) -> np.ndarray[Any, Any]:
    """The logprob of each token, from a forward pass over each sample alone."""
    found = np.zeros(micro_batch.input_ids.size, np.float32)
    for start, stop in zip(micro_batch.cu_seqlens[:-1], micro_batch.cu_seqlens[1:], strict=True):
        ids = torch.from_numpy(micro_batch.input_ids[start:stop].astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0, :-1]
        scaled = logits / torch.from_numpy(micro_batch.temperatures[start + 1 : stop].copy())[:, None]
        found[start + 1 : stop] = scaled.log_softmax(-1).gather(1, ids[1:, None])[:, 0].detach().numpy()
    return found


@pytest.mark.parametrize("form", [padded, packed])
def test_logprobs_are_those_of_each_sample_alone_at_its_temperature(tmp_path: Path, form: Any) -> None:
    model, [batch] = model_of("dense"), sealed(tmp_path)
    for micro_batch in batch.micro_batches():
        tensors = form(micro_batch)
        computed = token_logprobs(model(**tensors.model_inputs()).logits, tensors)
        flat, alone = tensors.flat(computed), one_by_one(model, micro_batch)
        trained = micro_batch.loss_mask > 0
        np.testing.assert_allclose(flat[trained], alone[trained], atol=1e-5)
        logprobs, here = computed.detach().numpy(), tensors.index >= 0
        np.testing.assert_allclose(logprobs[here], one_by_one(model, micro_batch)[tensors.index[here]], atol=1e-5)
        assert not logprobs[~here].any()


def test_logprobs_are_normalised_over_the_tokens_that_truncation_left(tmp_path: Path) -> None:
    model, [batch] = model_of("dense"), sealed(tmp_path)
    micro_batch = next(batch.micro_batches())
    sampled = np.flatnonzero(micro_batch.versions >= 0)
    lengths = np.where(micro_batch.versions >= 0, 3, 0)
    ids = np.concatenate([[i, (i + 1) % VOCABULARY, (i + 5) % VOCABULARY] for i in micro_batch.input_ids[sampled]])
    support = SamplingSupport(ids=ids.astype(np.int32), offsets=np.concatenate([[0], np.cumsum(lengths)]))
    drawn = replace(micro_batch, sampling=(lengths > 0).astype(np.uint8))
    object.__setattr__(drawn, "sampling_support", lambda: support)
    tensors = packed(drawn)
    logits = model(**tensors.model_inputs()).logits
    logprobs = token_logprobs(logits, tensors)[0]
    for number, token in enumerate(sampled.tolist()):
        scaled = logits[0, token - 1] / float(micro_batch.temperatures[token])
        left = scaled[torch.from_numpy(ids[3 * number : 3 * number + 3])]
        expected = scaled[micro_batch.input_ids[token]] - left.logsumexp(-1)
        assert float(logprobs[token]) == pytest.approx(float(expected), abs=1e-5)


def gradients(model: Any, batches: list[Batch], form: Any) -> list[Any]:
    model = copy.deepcopy(model)
    for batch in batches:
        for micro_batch in batch.micro_batches():
            tensors = form(micro_batch)
            logprobs = token_logprobs(model(**tensors.model_inputs()).logits, tensors)
            clipped_objective(logprobs, tensors, batch.totals.denominator).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_do_not_depend_on_ranks_or_form(tmp_path: Path) -> None:
    model = model_of("dense")
    whole = gradients(model, sealed(tmp_path / "one"), padded)
    for other in (
        gradients(model, sealed(tmp_path / "one"), packed),
        gradients(model, sealed(tmp_path / "two", data_ranks=2), padded),
    ):
        for one, two in zip(whole, other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-3)


def test_the_clipped_objective_by_hand(tmp_path: Path) -> None:
    [batch] = sealed(tmp_path)
    micro_batch = next(batch.micro_batches())
    tensors = packed(micro_batch)
    for shift in (-0.5, 0.0, 0.5):
        loss = clipped_objective(tensors.logprobs + shift, tensors, batch.totals.denominator, clip_high=0.3)
        ratio = math.exp(shift)
        expected = sum(
            -weight * min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
            for weight, advantage in zip(
                micro_batch.loss_weights.tolist(), micro_batch.advantages.tolist(), strict=True
            )
        )
        assert float(loss) == pytest.approx(expected / batch.totals.denominator, rel=1e-5)


def test_alignment_finds_a_shifted_token_and_its_version(tmp_path: Path) -> None:
    [batch] = sealed(tmp_path)
    micro_batch = next(batch.micro_batches())
    trained = np.flatnonzero(micro_batch.loss_mask)
    exact = replace(micro_batch, version_exact=np.ones_like(micro_batch.version_exact))
    versions = exact.versions.copy()
    versions[trained[1:]] = 9
    tensors = packed(replace(exact, versions=versions))
    same = Alignment()
    same.add(tensors.logprobs, tensors)
    assert (same.tokens, same.kl, same.max) == (trained.size, 0.0, 0.0)
    shifted, off = tensors.logprobs.clone(), Alignment()
    shifted[0, trained[0]] += 0.5
    off.add(shifted, tensors)
    assert off.max == pytest.approx(0.5)
    assert off.kl == pytest.approx((math.exp(0.5) - 1.5) / trained.size)
    assert {version: each.max > 0 for version, each in off.by_version.items()} == {3: True, 9: False}
    unknown = Alignment()
    unknown.add(shifted, packed(replace(micro_batch, version_exact=np.zeros_like(micro_batch.version_exact))))
    assert unknown.tokens == 0


@pytest.mark.parametrize("form", [padded, packed])
def test_recorded_routes_are_replayed_in_every_layer(tmp_path: Path, form: Any) -> None:
    model, [batch] = model_of("moe"), sealed(tmp_path, experts="uint8")
    micro_batch = next(batch.micro_batches())
    rows = micro_batch.routed_experts(missing=-1) % EXPERTS["num_experts"]
    rows[micro_batch.routed_valid() == 0] = -1
    routed = replace(micro_batch)
    object.__setattr__(routed, "routed_experts", lambda missing: rows)
    tensors, used = form(routed), dict[int, Any]()

    def keep(layer: int) -> Any:
        return lambda module, inputs, output: used.__setitem__(layer, inputs[1])

    hooks = [each.mlp.experts.register_forward_hook(keep(n)) for n, each in enumerate(model.model.layers)]
    with replayed_routing(model, tensors):
        replayed = model(**tensors.model_inputs()).logits
    flat = tensors.index.reshape(-1)
    for layer, experts in used.items():
        expected = rows[flat, layer]
        sent = (flat >= 0) & (expected[:, 0] >= 0)
        np.testing.assert_array_equal(experts.numpy()[sent], expected[sent])
    own = model(**tensors.model_inputs()).logits
    for hook in hooks:
        hook.remove()
    assert not torch.allclose(own, replayed)
    replayed.sum().backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0, "gradients reach the router"


def test_replaying_its_own_routes_changes_nothing(tmp_path: Path) -> None:
    model, [batch] = model_of("moe"), sealed(tmp_path, experts="uint8")
    micro_batch = next(batch.micro_batches())
    own: list[Any] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: own.append(output[2]))
        for layer in model.model.layers
    ]
    tensors = packed(micro_batch)
    plain = model(**tensors.model_inputs()).logits
    for hook in hooks:
        hook.remove()
    rows = torch.stack(own, 1).numpy()
    object.__setattr__(micro_batch, "routed_experts", lambda missing: rows)
    with replayed_routing(model, packed(micro_batch)):
        torch.testing.assert_close(model(**tensors.model_inputs()).logits, plain, atol=1e-5, rtol=1e-4)
