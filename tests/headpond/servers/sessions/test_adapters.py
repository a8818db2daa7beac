"""Sessions in front of an engine whose weights are LoRA adapters, one for each version."""

from pathlib import Path

from support.engine_clients import quick_engine
from support.engine_clients import run as run_loop
from support.engine_process import running as engine_running
from support.engine_process import write_weights
from support.session_process import running

from headpond.engines.replicas.control import EngineControl

LORA = {"engine__lora": "true", "engine__weight_update": "headpond"}


def test_a_chat_has_the_version_of_the_adapter_that_it_names_not_of_the_newest(tmp_path: Path) -> None:
    with engine_running(tmp_path, "--length", "constant:20", "--layers", "2") as engine:
        host, port = engine.address
        url = f"http://{host}:{port}"

        async def load() -> None:
            async with EngineControl.open(quick_engine(url, lora=True, weight_update="headpond")) as control:
                for version in (1, 2):
                    weights = str(write_weights(tmp_path, version))
                    await control.load(url, weights=weights, version=version, run="r1", timeout_s=20)

        run_loop(load)
        with running(tmp_path, url, **LORA) as sessions:
            named = []
            for model in ({}, {"model": "1@r1"}, {"model": "policy"}, {"model": ""}):
                agent = sessions.agent(run="r1", policy_version=2)
                assert agent.talk("hello", **model).status == 200
                sealed = agent.request("POST", "/seal").json
                named.append((sealed["version_first"], sealed["version_last"], sealed["inexact_tokens"]))
    assert named == [(2, 2, 0), (1, 1, 0), (2, 2, 0), (2, 2, 0)]
