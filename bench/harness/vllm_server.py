"""A real vLLM server for benchmarks: a small model with random weights, or the server at ENGINE_URL.

The model is a Qwen3 of 0.3 million parameters over bytes. vLLM itself fills in the weights (`--load-format dummy`), so
that only a configuration and a tokenizer are written.
"""

import json
import os
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headpond.errors import ConfigError
from headpond.processes.child_process import ChildProcess

PYTHON_VARIABLE, URL_VARIABLE = "HEADPOND_VLLM_PYTHON", "ENGINE_URL"
START_S = 300.0  # 20 to 60 s on an idle machine; the first start compiles bytecode
SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
    "dtype": "float32",
}
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
FLAGS = ["--dtype", "float32", "--load-format", "dummy", "--enforce-eager", "--max-num-seqs", "64"]


@contextmanager
def vllm_url() -> Iterator[str]:
    """The URL of a server. ConfigError if neither variable names one."""
    if url := os.environ.get(URL_VARIABLE):
        yield url.rstrip("/").removesuffix("/v1")
        return
    python = Path(os.environ.get(PYTHON_VARIABLE, "")).absolute()
    if not os.environ.get(PYTHON_VARIABLE) or not python.is_file():
        raise ConfigError(
            f"no vLLM: set {PYTHON_VARIABLE} to the Python of an environment that has it (`make vllm` makes "
            f".venv-vllm/bin/python), or {URL_VARIABLE} to the URL of a running server"
        )
    with tempfile.TemporaryDirectory(prefix="headpond-bench-vllm-") as directory:
        model, port = write_model(Path(directory, "model")), free_port()
        address = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy"]
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *FLAGS, *address]
        process = ChildProcess("vllm", command, directory=Path(directory), variables=VARIABLES)
        try:
            url = f"http://127.0.0.1:{port}"
            process.wait_until(lambda: healthy(url), what="vLLM is ready", timeout_s=START_S)
            yield url
        finally:
            process.kill()


def write_model(directory: Path) -> Path:
    directory.mkdir()
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 256 + number, "content": token, "special": True} | dict.fromkeys(_ADDED, False)
            for number, token in enumerate(SPECIAL)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": byte_vocabulary(), "merges": []},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1], "chat_template": TEMPLATE}
    files: dict[str, Any] = {"config": MODEL, "tokenizer": tokenizer, "tokenizer_config": settings}
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


_ADDED = ("single_word", "lstrip", "rstrip", "normalized")


def byte_vocabulary() -> dict[str, int]:
    """One token per byte. The format writes bytes that do not print as characters from 256 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte if byte in printed else 256 + others.index(byte)): byte for byte in range(256)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as response:  # noqa: S310  http on loopback
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def model_name(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30.0) as response:  # noqa: S310  the user's own server
        return json.load(response)["data"][0]["id"]
