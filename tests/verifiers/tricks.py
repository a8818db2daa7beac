"""A taskset for the tests: each task does one thing that environments do, most of them errors.

The child process imports it by name, with this directory on PYTHONPATH.
"""

import asyncio
import functools
import os
import time
from collections.abc import Iterator

import httpx
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.utils.score import verify_boxed_math_answer

__all__ = ["TricksHarness", "TricksTaskset"]

FOREVER_S = 1000


class TrickData(vf.TaskData):
    trick: str


class Trick(vf.Task[TrickData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.trick == "setup_timeout":
            await asyncio.sleep(FOREVER_S)

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.trick == "finalize_timeout":
            await asyncio.sleep(FOREVER_S)

    @vf.reward
    async def whole(self, trace: vf.Trace) -> float:
        match self.data.trick:
            case "scoring_timeout":
                await asyncio.sleep(FOREVER_S)
            case "boxed":
                return verify_boxed_math_answer(trace.last_reply, "4")
            case "raises":
                raise KeyError("a bug")
            case "nan":
                return float("nan")
            case "kills_itself":
                os._exit(3)
            case "hangs":
                time.sleep(FOREVER_S)  # noqa: ASYNC251 - blocks on purpose
        return 1.0

    @vf.reward(weight=0.25)
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        return {"first": 1.0, "second": 2.0}

    @vf.metric
    async def depth(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class TricksConfig(vf.TasksetConfig):
    tricks: list[str] = Field(default_factory=list)


class TricksTaskset(vf.Taskset[Trick, TricksConfig]):
    INFINITE = True  # although `load` ends

    def load(self) -> Iterator[Trick]:
        for name in self.config.tricks:
            stage = name.removesuffix("_timeout")
            timeout = vf.TaskTimeout.model_validate({stage: 0.5} if stage != name else {})
            yield Trick(TrickData(trick=name, prompt=name, timeout=timeout), self.config.task)


class TricksHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        response = await self._chat(endpoint, secret, str(data.prompt))
        exit_code, output = 0, ""
        match data.prompt:
            case "agent_timeout":
                await asyncio.sleep(FOREVER_S)
            case "exits":
                exit_code, output = 7, "no such tool"
            case "prints_environment":
                printed = await runtime.run(["env"], {})
                await self._chat(endpoint, secret, printed.stdout)
            case "program":
                marks = os.environ["TRICKS_MARKS"]
                script = f"pwd > {marks}/workdir; echo $$ > {marks}/pid; sleep {FOREVER_S} & wait"
                await runtime.run(["/bin/sh", "-c", script], {})
            case "swallows":
                pass
            case _:
                response.raise_for_status()
        return vf.ProgramResult(exit_code=exit_code, stdout=output, stderr="")

    async def _chat(self, endpoint: str, secret: str, text: str) -> httpx.Response:
        return await http().post(
            f"{endpoint}/chat/completions",
            json={"model": "any model name", "messages": [{"role": "user", "content": text}]},
            headers={"Authorization": f"Bearer {secret}"},
        )


@functools.cache
def http() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=None)
