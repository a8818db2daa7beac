"""Control endpoints against engines as processes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine_clients import quick_engine, run
from support.engine_process import CHAT, EngineProcess, running, user, write_weights
from support.upstream import Response, serving
from support.waiting import wait_until_async

from headpond.engines.dialects import Prompt, dialect_of
from headpond.engines.http.client import EngineClient, Request
from headpond.engines.replicas.control import UNREACHABLE, EngineControl
from headpond.engines.replicas.selection import Orders, Replicas
from headpond.errors import InfrastructureFailure
from headpond.playing.policy import named_adapter
from headpond.turn import SaidVersion

DIALECTS = ("vllm", "sglang")
HELLO: dict[str, Any] = {"messages": [user("hi")], "seed": 1}


@pytest.fixture(scope="module", params=DIALECTS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    directory = tmp_path_factory.mktemp(request.param)
    with running(directory, "--dialect", request.param, "--length", "constant:60") as engine:
        yield engine


def url_of(engine: EngineProcess) -> str:
    host, port = engine.address
    return f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def control_of(engine: EngineProcess) -> AsyncIterator[EngineControl]:
    url = url_of(engine)  # waits until the engine listens and has logged its dialect
    dialect = "sglang" if "dialect=sglang" in engine.text else "vllm"
    async with EngineControl.open(quick_engine(url, dialect=dialect)) as control:
        yield control


def content(engine: EngineProcess, **fields: str) -> str:
    return json.loads(engine.answer(CHAT, HELLO | fields))["choices"][0]["message"]["content"]


def test_loaded_weights_have_the_name_of_version_and_run(engine: EngineProcess, tmp_path: Path) -> None:
    async def main() -> None:
        async with control_of(engine) as control:
            before = content(engine)
            weights = str(write_weights(tmp_path, 7))
            await control.load(url_of(engine), weights=weights, version=7, run="r1", timeout_s=20)
            label = await control.label(url_of(engine))
            assert label is not None
            assert (label.text, label.version, label.run, label.unfit) == ("7@r1", 7, "r1", None)
            assert content(engine) != before

    run(main)


VLLM_UPDATE: list[tuple[str, Any]] = [
    ("/pause?mode=keep", None),
    ("/update_weight_version", {"new_version": "loading 7@r1"}),
    ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}),
    ("/reset_prefix_cache?reset_running_requests=true", None),
    ("/update_weight_version", {"new_version": "7@r1"}),
    ("/resume", None),
]
SGLANG_UPDATE: list[tuple[str, Any]] = [
    ("/pause_generation", {"mode": "retract"}),
    ("/update_weight_version", {"new_version": "loading 7@r1", "abort_all_requests": False}),
    (
        "/update_weights_from_disk",
        {"model_path": "/w", "weight_version": "7@r1", "flush_cache": True, "abort_all_requests": False},
    ),
    ("/continue_generation", {}),
]


@pytest.mark.parametrize(
    ("dialect", "expected"), [("vllm", VLLM_UPDATE), ("generate", VLLM_UPDATE), ("sglang", SGLANG_UPDATE)]
)
def test_an_update_holds_requests_names_what_it_loads_and_drops_the_cache(
    dialect: str, expected: list[tuple[str, Any]]
) -> None:
    """In this order, each once: what a server does not do cannot be seen in the scripted engine's answers."""

    async def main() -> None:
        async with EngineControl.open(quick_engine(server.url, dialect=dialect)) as control:
            await control.load(server.url, weights="/w", version=7, run="r1", timeout_s=20)

    with serving(lambda _: Response(body=b'{"success": true}')) as server:
        run(main)
    paths = [f"{request.path}?{request.query}".rstrip("?") for request in server.received]
    assert list(zip(paths, [request.body for request in server.received], strict=True)) == expected


def test_a_page_that_arrives_in_pieces_is_read_whole() -> None:
    """vLLM's metrics have tens of kilobytes, its models as many as it has adapters."""
    adapters = [{"id": f"{version}@r1", "padding": "." * 1000} for version in range(1, 500)]

    async def main() -> None:
        settings = quick_engine(server.url, lora=True, weight_update="headpond")
        async with EngineControl.open(settings) as control:
            load = await control.busyness(server.url)
            assert load is not None
            assert (load.running, load.waiting) == (2, 3)
            label = await control.label(server.url)
            assert label is not None
            assert label.version == 499

    with serving(lambda _: Response(body=json.dumps({"data": adapters}).encode())) as server:
        server.metrics = "vllm:num_requests_waiting 3\n" + "# HELP\n" * 60_000 + "vllm:num_requests_running 2\n"
        run(main)


def test_an_engine_that_cannot_load_says_so_and_generates_on(engine: EngineProcess, tmp_path: Path) -> None:
    async def main() -> None:
        async with control_of(engine) as control:
            with pytest.raises(InfrastructureFailure, match="cannot load weights from /nowhere"):
                await control.load(url_of(engine), weights="/nowhere", version=8, run="r1", timeout_s=20)
            label = await control.label(url_of(engine))
            assert label is not None
            assert (label.text, label.unfit) == ("failed 8@r1", "failed")
            assert content(engine)
            weights = str(write_weights(tmp_path, 8))
            await control.load(url_of(engine), weights=weights, version=8, run="r1", timeout_s=20)
            label = await control.label(url_of(engine))
            assert label is not None
            assert label.text == "8@r1"

    run(main)


def test_an_update_that_is_cancelled_leaves_an_engine_that_generates(tmp_path: Path) -> None:
    async def main() -> None:
        with running(tmp_path) as engine:
            async with control_of(engine) as control:
                weights = str(write_weights(tmp_path, 2))
                loading = asyncio.create_task(
                    control.load(url_of(engine), weights=weights, version=2, run="r1", timeout_s=20)
                )
                await asyncio.sleep(0)
                loading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await loading
                label = await control.label(url_of(engine))
                assert label is not None
                assert label.text == "failed 2@r1"
                assert content(engine)

    run(main)


def test_a_server_without_control_endpoints_says_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        with running(tmp_path, "--no-dev-mode") as engine:
            async with control_of(engine) as control:
                assert await control.label(url_of(engine)) is None
                with pytest.raises(InfrastructureFailure, match="VLLM_SERVER_DEV_MODE=1"):
                    await control.load(url_of(engine), weights="/w", version=1, run="r1", timeout_s=20)
            engine.end()
            async with control_of(engine) as control:
                with pytest.raises(UNREACHABLE):
                    await control.label(url_of(engine))

    run(main)


def test_requests_are_held_while_weights_are_loaded(tmp_path: Path) -> None:
    """A request in flight has tokens of both versions, and none of the time between."""

    async def main() -> None:
        with running(tmp_path, "--latency", "constant:600", "--length", "constant:60", "--dialect", "sglang") as engine:
            fields = {"logprobs": True, "return_meta_info": True}
            answer = asyncio.create_task(asyncio.to_thread(engine.answer, CHAT, HELLO | fields))
            await wait_until_async(
                lambda: b'running_reqs{model_name="scripted"} 1.0' in engine.request("/metrics", method="GET")[1]
            )
            async with control_of(engine) as control:
                weights = str(write_weights(tmp_path, 3))
                await control.load(url_of(engine), weights=weights, version=3, run="r1", timeout_s=20)
            spans = json.loads(await answer)["choices"][0]["meta_info"]["weight_versions"]
            assert [span["version"] for span in spans] == ["default", "3@r1"]

    run(main)


@pytest.mark.parametrize(("dialect", "model"), [("vllm", "5@r1"), ("sglang", "policy:5@r1")])
def test_each_version_of_an_adapter_has_a_name_that_requests_use(tmp_path: Path, dialect: str, model: str) -> None:
    """The newest three are kept; a turn has the version of the adapter that its request names."""

    async def main() -> None:
        with running(tmp_path, "--dialect", dialect, "--length", "constant:60") as engine:
            url = url_of(engine)
            settings = quick_engine(url, dialect=dialect, lora=True, weight_update="headpond")
            async with EngineControl.open(settings) as control, EngineClient.open(settings) as client:
                unnamed = None, SaidVersion(0, exact=True)
                assert await named_adapter(dialect_of(settings), client.replicas) == unnamed
                for version in range(1, 6):
                    weights = str(write_weights(tmp_path, version))
                    await control.load(url, weights=weights, version=version, run="r1", timeout_s=20)
                models = json.loads(engine.request("/v1/models", method="GET")[1])["data"]
                assert [each["id"] for each in models] == ["policy", "3@r1", "4@r1", "5@r1"]
                with pytest.raises(InfrastructureFailure, match="cannot load weights from /nowhere"):
                    await control.load(url, weights="/nowhere", version=6, run="r1", timeout_s=20)
                client.replicas.follow(Orders(run="r1", sequence=1, version=5, least_version=5))
                named = await named_adapter(dialect_of(settings), client.replicas)
                assert named == (model, SaidVersion(5, exact=True))
                assert content(engine, model=model) != content(engine)

    run(main)


@pytest.mark.parametrize(("dialect", "prefix"), [("vllm", ""), ("sglang", "policy:")])
def test_an_adapter_that_a_chat_names_has_a_version_only_if_the_run_has_loaded_it(dialect: str, prefix: str) -> None:
    async def main() -> None:
        settings = quick_engine("http://127.0.0.1:9", dialect=dialect, lora=True, weight_update="headpond")
        replicas = Replicas(settings.urls, lora=True)

        async def version_of(name: str) -> SaidVersion | None:
            model, version = await named_adapter(dialect_of(settings), replicas, name)
            assert model == name
            return version

        assert await version_of(f"{prefix}3@r1") == SaidVersion(3, exact=True)
        replicas.follow(Orders(run="r1", sequence=1, version=5, abandoned=(4,)))
        assert await version_of(f"{prefix}3@r1") == SaidVersion(3, exact=True)
        # SGLang answers without an adapter if the name has no colon.
        others = ["3@r2", "4@r1", "loading 3@r1", "failed 3@r1", "3", "9999999999@r1", "3@r1:", "a-user-s-own"]
        for name in [*(prefix + other for other in others), "3@r1" if prefix else "policy:3@r1", ":", "policy:"]:
            assert await version_of(name) == SaidVersion(0, exact=False), name

    run(main)


def test_a_request_that_names_no_adapter_is_of_version_0_although_the_first_was_loaded_meanwhile(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        with running(tmp_path, "--length", "constant:60") as engine:
            url = url_of(engine)
            settings = quick_engine(url, lora=True, weight_update="headpond")
            dialect, unshifted = dialect_of(settings), content(engine)
            async with EngineControl.open(settings) as control, EngineClient.open(settings) as client:
                model, version = await named_adapter(dialect, client.replicas)
                weights = str(write_weights(tmp_path, 1))
                await control.load(url, weights=weights, version=1, run="r1", timeout_s=20)
                client.replicas.follow(Orders(run="r1", sequence=1, version=1))
                body = dialect.request_body(Prompt(messages=HELLO["messages"]), {"seed": 1}, model=model)
                request = Request(dialect=dialect, body=body, headers={}, version=version)
                response = await client.send(request, lambda body: json.loads(bytes(body)))
        assert response.value["choices"][0]["message"]["content"] == unshifted
        assert response.version == SaidVersion(0, exact=True)

    run(main)
