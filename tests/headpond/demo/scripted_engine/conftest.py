"""Engines that all tests share, started once and in parallel."""

from collections.abc import Iterator

import pytest
from support.engine_process import EngineProcess

FORMS = ("object", "npy", "bare")
SHAPE = ("--layers", "3", "--topk", "2", "--experts", "16")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], EngineProcess]]:
    """By dialect and form of routed experts."""
    directory = tmp_path_factory.mktemp("engines")
    started = {
        (dialect, form): EngineProcess(directory, "--dialect", dialect, "--form", form, *SHAPE)
        for dialect in ("vllm", "sglang")
        for form in FORMS
    }
    try:
        yield started
    finally:
        for engine in started.values():
            engine.end()


@pytest.fixture
def engine(engines: dict[tuple[str, str], EngineProcess]) -> EngineProcess:
    return engines["vllm", "object"]


@pytest.fixture
def sglang(engines: dict[tuple[str, str], EngineProcess]) -> EngineProcess:
    return engines["sglang", "bare"]
