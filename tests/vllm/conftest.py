"""A real vLLM server, tiny models and Hugging Face's forward pass, or any server: ENGINE_URL.

HEADPOND_VLLM_PYTHON is the Python of the environment with vLLM. VLLM_MODEL=moe serves the mixture of experts, without
the tests that reload weights, which the builds for CPU do for dense models only. With ENGINE_URL, tests that start,
stop or update a server, or that compare with the weights of the tiny models, are left out. The summary says what was.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tokenizer_directory
from support.alignment import Alignment, Reference, align, reference_of, weights_of
from support.documents import ROOT
from support.tokenizer_directory import TEMPLATE, tokenizer_dir
from support.vllm_playing import Played, Table
from support.vllm_server import AnyEngine, Release, VllmServer

URL = os.environ.get("ENGINE_URL", "")
PYTHON = Path(os.environ.get("HEADPOND_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python")).absolute()
TOKENIZER = os.environ.get("TOKENIZER", "")
KIND = os.environ.get("VLLM_MODEL", "dense")
SCRIPT = ROOT / "tests" / "support" / "tiny_models.py"
NEEDS = {
    "server": "controls the server's process or its weights",
    "start_server": "starts servers with flags of its own",
    "reference": "compares with a forward pass under known weights",
}
RELOADS = {"reloading": "reloads weights, which a mixture of experts on CPU does not"}
if not TOKENIZER:
    NEEDS["tokenizer"] = "renders prompts: set TOKENIZER to the directory of the model's tokenizer"
left_out: dict[str, list[str]] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start servers of their own come first, before the server of the session starts; whole runs, which kill
    that one, come last."""
    items.sort(key=lambda item: ("start_server" not in item.fixturenames, "test_runs" in item.nodeid))  # type: ignore[attr-defined]
    absent = NEEDS if URL else RELOADS if KIND == "moe" else {}
    here = {item: next((absent[name] for name in absent if name in item.fixturenames), "") for item in items}  # type: ignore[attr-defined]
    for item, why in here.items():
        if why:
            left_out.setdefault(why, []).append(item.name)
    config.hook.pytest_deselected(items=[item for item, why in here.items() if why])
    items[:] = [item for item, why in here.items() if not why]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for why, names in left_out.items():
        terminalreporter.write_line(f"left out, each {why}: {', '.join(names)}")


@pytest.fixture(scope="session")
def release() -> Release:
    assert PYTHON.exists(), f"no vLLM at {PYTHON}: run `make vllm`, or set HEADPOND_VLLM_PYTHON or ENGINE_URL"
    return Release(PYTHON, KIND)


@pytest.fixture(scope="session")
def models(release: Release) -> Path:
    """The tiny models, made once an environment: moe/0 ..., dense/0 ..., lora/1 ..., tokenizer."""
    sources = SCRIPT.read_bytes() + Path(tokenizer_directory.__file__).read_bytes() + Path(__file__).read_bytes()
    directory = PYTHON.parent.parent / f"tiny-models-{KIND}-{hashlib.sha256(sources).hexdigest()[:12]}"
    if not directory.exists():
        new = directory.with_suffix(f".{os.getpid()}")
        tokenizer_dir(
            new / "tokenizer",
            template=chat_template(),
            tokenizer_class="PreTrainedTokenizerFast",
            eos_token="<|im_end|>",
        )
        subprocess.run([str(PYTHON), str(SCRIPT), str(new), str(new / "tokenizer"), KIND], check=True)
        new.rename(directory)
    return directory


@pytest.fixture(scope="session")
def weights(models: Path, release: Release) -> dict[int, Path]:
    """The directory of each version of the model that `server` serves."""
    return weights_of(models, release.kind)


def chat_template() -> str:
    """Prints nothing for `content: null`, and marks no empty thought, so that each prompt extends the last."""
    content, thought = "{{- message.content }}\n        {%- for call", "{{- '<think>\\n\\n</think>\\n\\n' }}"
    assert content in TEMPLATE
    assert thought in TEMPLATE
    return TEMPLATE.replace(content, content.replace("content }}", "content or '' }}")).replace(thought, "")


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of the servers, kept in VLLM_LOGS if that is set."""
    if kept := os.environ.get("VLLM_LOGS"):
        shutil.rmtree(kept, ignore_errors=True)
        Path(kept).mkdir(parents=True)
        return Path(kept)
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def running_server(release: Release, weights: dict[int, Path], log_dir: Path) -> Iterator[VllmServer]:
    server = VllmServer(release, weights[0], log_dir)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


@pytest.fixture
def server(running_server: VllmServer, weights: dict[int, Path]) -> VllmServer:
    """The server of the whole session, with its first weights."""
    if running_server.weights != weights[0]:
        running_server.load(weights[0], 0)
    return running_server


@pytest.fixture
def reloading(server: VllmServer) -> VllmServer:
    """The same, for tests that load weights while it serves."""
    return server


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> AnyEngine:
    """The server of the session, or that of ENGINE_URL."""
    return AnyEngine(URL) if URL else request.getfixturevalue("server")


@pytest.fixture
def start_server(release: Release, models: Path, log_dir: Path) -> Iterator[Callable[..., VllmServer]]:
    """Starts a server with flags of a test's own, for tests that run while no other server does (`slow`)."""
    started: list[VllmServer] = []

    def start(model: str, *flags: str, **more: Any) -> VllmServer:
        server = VllmServer(release, models / model, log_dir, *flags, **more)
        started.append(server)
        server.wait_ready()
        return server

    yield start
    for server in started:
        server.end()


@pytest.fixture(scope="session")
def reference(release: Release) -> Iterator[Reference]:
    with reference_of(release.python) as reference:
        yield reference


@pytest.fixture
def aligned(
    server: VllmServer, reference: Reference, weights: dict[int, Path], release: Release
) -> Callable[..., Alignment]:
    """Asserts that every trained token has an exact version and is aligned, and every row that an engine can send."""

    def check(played: list[Played]) -> Alignment:
        samples = [sample for each in played for sample in each.samples]
        found = align(samples, reference, weights)
        assert not found.problems, found.problems[:10]
        assert found.left_out == 0
        assert found.tokens == sum(int((sample.trained != 0).sum()) for sample in samples) > 0
        if release.has_routes:  # the last token of a sample was never an input of the model
            assert found.rows == sum(len(sample.ids) - 1 for sample in samples)
        return found

    return check


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> str:
    return TOKENIZER or str(request.getfixturevalue("models") / "tokenizer")


@pytest.fixture
def table(engine: AnyEngine, tmp_path: Path, request: pytest.FixtureRequest) -> Table:
    """Rollouts in the dialect of chats; routed experts wherever the release returns them."""
    routes = not URL and request.getfixturevalue("release").has_routes
    return Table(engine=engine, directory=tmp_path, settings={"engine": {"routed_experts": routes}})
