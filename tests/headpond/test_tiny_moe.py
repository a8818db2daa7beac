"""The model of the demo: its gradient against finite differences, replayed routes, its file."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.played_steps import windows_of

from headpond.demo import tiny_moe
from headpond.demo.tiny_moe import BEFORE, LAYERS, TOPK, WINDOW, Array, Weights
from headpond.errors import ConfigError
from headpond.renderers import bytes_chatml

STEP = 1e-6
IDS = bytes_chatml.encode([{"role": "user", "content": "copy 31"}, {"role": "assistant", "content": "31"}])


def float64_weights(seed: int = 0) -> Weights:
    return {name: array.astype(np.float64) for name, array in tiny_moe.initial_weights(seed).items()}


def scored(weights: Weights, windows: Array, routes: Array, slopes: Array) -> float:
    """Any smooth function of all logits."""
    logits = tiny_moe.logits(weights, tiny_moe.forward(weights, windows, routes).hidden)
    return float((slopes * np.sin(logits)).sum())


def test_the_gradient_is_that_of_finite_differences() -> None:
    generator, weights = np.random.default_rng(1), float64_weights()
    windows = windows_of(IDS)[5:25]
    routes = np.argsort(generator.random((len(windows), LAYERS, tiny_moe.EXPERTS)), axis=2)[:, :, :TOPK]
    passed = tiny_moe.forward(weights, windows, routes)
    slopes = generator.standard_normal((len(windows), tiny_moe.VOCABULARY))
    of_logits = slopes * np.cos(tiny_moe.logits(weights, passed.hidden))
    gradient = tiny_moe.gradient(weights, passed, of_logits)
    assert gradient.keys() == weights.keys()
    for name, array in gradient.items():
        largest = np.argsort(-np.abs(array), axis=None)[:3]
        for place in (*largest, *generator.integers(array.size, size=5)):
            ends: list[float] = []
            for sign in (1, -1):
                moved = {**weights, name: weights[name].copy()}
                moved[name].flat[place] += sign * STEP
                ends.append(scored(moved, windows, routes, slopes))
            expected = (ends[0] - ends[1]) / (2 * STEP)
            assert array.flat[place] == pytest.approx(expected, rel=1e-6, abs=1e-6), f"{name}[{place}]"


def test_replayed_routes_give_the_same_hidden_states_and_others_do_not() -> None:
    weights, windows = tiny_moe.initial_weights(3), windows_of(IDS)
    passed = tiny_moe.forward(weights, windows)
    assert (passed.routes.dtype, passed.routes.shape) == (np.uint8, (len(IDS) + 1, LAYERS, TOPK))
    assert len(np.unique(passed.routes)) > TOPK, "tokens are routed to different experts"
    replayed = tiny_moe.forward(weights, windows, passed.routes)
    assert np.array_equal(replayed.hidden, passed.hidden)
    free = tiny_moe.forward(weights, windows, np.full(passed.routes.shape, -1))
    assert np.array_equal(free.hidden, passed.hidden), "missing routes are chosen by the router"
    other = tiny_moe.forward(weights, windows, (passed.routes + 1) % tiny_moe.EXPERTS)
    assert np.abs(other.hidden - passed.hidden).max(axis=1).min() > 1e-4


def test_a_window_ends_before_the_token_that_it_predicts() -> None:
    windows = windows_of(IDS)
    assert windows.shape == (len(IDS) + 1, WINDOW)
    assert windows[0].tolist() == [BEFORE] * WINDOW
    assert windows[2].tolist() == [BEFORE] * (WINDOW - 2) + IDS[:2].tolist()
    assert windows[-1].tolist() == IDS[-WINDOW:].tolist()


def test_first_weights_write_digits_and_ends() -> None:
    weights = tiny_moe.initial_weights(0)
    assert 10_000 < sum(array.size for array in weights.values()) < 100_000
    passed = tiny_moe.forward(weights, windows_of(IDS)[-1:])
    shares = np.exp(tiny_moe.log_softmax(tiny_moe.logits(weights, passed.hidden)))
    words = [*tiny_moe.FIRST_WORDS, tiny_moe.MESSAGE_END]
    assert shares[0, words].sum() > 0.9
    assert shares[0, words].min() > 0.02


def test_a_saved_model_is_loaded_bit_for_bit_and_is_a_safetensors_file(tmp_path: Path) -> None:
    weights = tiny_moe.initial_weights(7)
    tiny_moe.save(tmp_path / "a", weights)
    tiny_moe.save(tmp_path / "b", dict(reversed(weights.items())))
    first, second = ((tmp_path / name / tiny_moe.FILE).read_bytes() for name in "ab")
    assert first == second, "the order of the arrays does not matter"
    for loaded in (tiny_moe.load(tmp_path / "a"), load_file(tmp_path / "a" / tiny_moe.FILE)):
        assert loaded.keys() == weights.keys()
        assert all(np.array_equal(loaded[name], weights[name]) for name in weights)


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load a model from .*FileNotFoundError"):
        tiny_moe.load(tmp_path)
    weights = tiny_moe.initial_weights(0)
    tiny_moe.save(tmp_path, {name: array[:-1] for name, array in weights.items()})
    with pytest.raises(ConfigError, match="is not a tiny-moe model"):
        tiny_moe.load(tmp_path)
    (tmp_path / tiny_moe.FILE).write_bytes((tmp_path / tiny_moe.FILE).read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot load a model"):
        tiny_moe.load(tmp_path)
