from pathlib import Path

import pytest
from support.engine_process import running

from bench import engine_real
from bench.harness.vllm_server import byte_vocabulary, write_model
from headpond.errors import ConfigError


def test_measures_the_same_load_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, "--length", "constant:8") as engine:
        host, port = engine.address
        monkeypatch.setenv("ENGINE_URL", f"http://{host}:{port}/v1")
        report = engine_real.run(quick=True)
    assert report.quick
    assert min(report.figures.values()) >= 0
    assert report.figures["directly: turns a second"] > 0
    (target,) = report.targets
    assert (target.limit, target.sense) == (0.9, "at least")


@pytest.mark.parametrize("python", ["", "/nowhere/bin/python"])
def test_without_a_server_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    monkeypatch.delenv("ENGINE_URL", raising=False)
    monkeypatch.setenv("HEADPOND_VLLM_PYTHON", python)
    with pytest.raises(ConfigError, match=r"set HEADPOND_VLLM_PYTHON .*`make vllm`.*, or ENGINE_URL"):
        engine_real.run(quick=True)


def test_the_tokenizer_of_the_model_has_one_token_for_each_byte(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(write_model(tmp_path / "model") / "tokenizer.json"))
    text = "<|im_start|>user\nGrüße, 1 + 1?<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert ids == [256, *"user\nGrüße, 1 + 1?".encode(), 257]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert sorted(byte_vocabulary().values()) == list(range(256))
