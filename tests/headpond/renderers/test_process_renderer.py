import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.engine_clients import run
from support.tokenizer_directory import tokenizer_dir
from support.waiting import wait_until

from headpond.config.engine import RendererSettings
from headpond.errors import BadRequest, InfrastructureFailure
from headpond.renderers import NextTurn, PooledRenderer, Renderer, process_renderer
from headpond.renderers.pools import build
from headpond.renderers.process_renderer import ProcessRenderer
from headpond.renderers.tokenizer_directory import DirectoryRenderer
from headpond.turn import Ids

MESSAGES = [{"role": "user", "content": "What is twelve plus thirty?"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_dir(tmp_path_factory.mktemp("tokenizers") / "small")


def build_in(directory: Path, **template: Any) -> Renderer:
    return build(RendererSettings(backend="directory", chat_template_kwargs=template), str(directory))


def built(directory: Path) -> ProcessRenderer:
    renderer = build_in(directory)
    assert isinstance(renderer, ProcessRenderer)
    return renderer


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_renderer_in_a_child_process_gives_the_same_results(directory: Path) -> None:
    here, there = DirectoryRenderer(directory, {}), built(directory)
    prompt_ids = there.render(MESSAGES)
    assert prompt_ids.tolist() == here.render(MESSAGES).tolist()
    completion_ids = prompt_ids[3:7]
    both = [renderer.bridge(prompt_ids, completion_ids, MESSAGES) for renderer in (here, there)]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0].tolist() == both[1].tolist()
    assert there.message(completion_ids) == here.message(completion_ids)
    with pytest.raises(BadRequest, match=r"chat template .*: unknown role robot"):
        there.render([{"role": "robot", "content": ""}])
    with pytest.raises(BadRequest, match="pickled"):
        there.render(MESSAGES, tools=[{"call": lambda: None}])
    assert there.render(MESSAGES).tolist() == prompt_ids.tolist()


def test_a_process_that_died_is_replaced_within_the_call(directory: Path) -> None:
    renderer = built(directory)
    before = renderer.pid
    os.kill(before, signal.SIGKILL)
    assert len(renderer.render(MESSAGES))
    assert renderer.pid != before
    wait_until(lambda: not is_running(before))


def test_a_process_that_hangs_is_replaced(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = built(directory)
    before = renderer.pid
    os.kill(before, signal.SIGSTOP)
    monkeypatch.setattr(process_renderer, "CALL_TIMEOUT_S", 2.0)
    assert len(renderer.render(MESSAGES))
    assert renderer.pid != before


def test_a_process_ends_with_its_renderer(directory: Path) -> None:
    renderer = built(directory)
    pid = renderer.pid
    assert is_running(pid)
    del renderer
    gc.collect()
    wait_until(lambda: not is_running(pid))


def test_a_process_ends_with_a_parent_that_was_killed(directory: Path) -> None:
    script = (
        "import sys; from headpond.renderers.process_renderer import ProcessRenderer; "
        "renderer = ProcessRenderer(backend='directory', model=sys.argv[1], options={}, template={}); "
        "print(renderer.pid, flush=True); input()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.communicate()
    wait_until(
        lambda: not is_running(pid) or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )


def test_a_build_that_dies_is_an_infrastructure_failure(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # Python cannot start with this
    with pytest.raises(InfrastructureFailure, match=r"renderer of .* died"):
        build_in(directory)
    monkeypatch.delenv("PYTHONHOME")
    assert len(built(directory).render(MESSAGES))


def test_building_a_renderer_does_not_affect_others(directory: Path, tmp_path: Path) -> None:
    """Other renderers are built with their own template arguments while one keeps encoding."""
    environment = dict(os.environ)

    async def main() -> None:
        renderer = PooledRenderer(partial(build_in, directory), max_renderers=1)
        turn = NextTurn(messages=MESSAGES)
        expected = (await renderer.prompt_ids(turn)).tolist()
        others = [PooledRenderer(partial(build_in, directory, enable_thinking=False, n=n)) for n in range(3)]
        building = asyncio.gather(*(other.pool() for other in others))
        encoded = 0
        while not building.done() or not encoded:
            assert (await renderer.prompt_ids(turn)).tolist() == expected
            encoded += 1
        assert (await others[-1].prompt_ids(turn)).tolist() != expected
        assert (await renderer.prompt_ids(turn)).tolist() == expected

    run(main)
    assert os.environ == environment


def test_a_completion_is_parsed_while_the_process_encodes(directory: Path) -> None:
    renderer = built(directory)
    text, done = "The quick brown fox jumps over the lazy dog. " * 20_000, list[Ids]()
    encoding = threading.Thread(target=lambda: done.append(renderer.render([{"role": "user", "content": text}])))
    encoding.start()
    ids = DirectoryRenderer(directory, {}).render(MESSAGES)
    message: dict[str, Any] = renderer.message(ids[3:])
    assert "twelve" in message["content"]
    encoding.join()
    assert len(done[0]) > 100_000
