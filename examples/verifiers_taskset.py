"""A taskset and a harness for the package `verifiers`. They do not depend on Headpond.

    [environments.sums]
    use = "verifiers"                               # pip install 'headpond[verifiers]'
    options = { taskset = "verifiers_taskset" }     # with examples/ on the worker's PYTHONPATH

`load` yields the examples, `@vf.reward` methods are the named rewards, `@vf.metric` methods the metrics. The harness
runs in the process itself; the package's own harnesses install a program at run time.
"""

import functools
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["SumsHarness", "SumsTaskset"]

PROMPT = "What is {text}? Think it through, then end with a line `Answer: N`, where N is a whole number."
TURNS = 2


class SumData(vf.TaskData):
    answer: int


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(stated(trace.last_reply) == self.data.answer)

    @vf.reward(weight=0.1)
    async def at_once(self, trace: vf.Trace) -> float:
        return float(trace.num_turns == 1)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    size: int = 64
    largest: int = 50
    seed: int = 0


class SumsTaskset(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        draw = random.Random(self.config.seed)  # noqa: S311
        for _ in range(self.config.size):
            first, second = draw.randint(1, self.config.largest), draw.randint(1, self.config.largest)
            prompt = PROMPT.format(text=f"{first} + {second}")
            yield Sum(SumData(prompt=prompt, answer=first + second), self.config.task)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    """Asks a second time if the first completion states no answer."""

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
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        for _ in range(TURNS):
            response = await http().post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
            response.raise_for_status()
            messages.append(response.json()["choices"][0]["message"])
            if stated(messages[-1]["content"] or "") is not None:
                break
            messages.append({"role": "user", "content": "End with a line `Answer: N`."})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@functools.cache
def http() -> httpx.AsyncClient:
    """Shared by all episodes: creating a client takes 0.1 s, and every episode has its own harness."""
    return httpx.AsyncClient(timeout=None)  # noqa: S113  the rollout has a timeout


def stated(text: str) -> int | None:
    answers = re.findall(r"Answer: (-?\d+)", text)
    return int(answers[-1]) if answers else None
