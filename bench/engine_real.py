"""`python -m bench engine-real`: turns per second of a real vLLM through Headpond, against the same load sent directly.

A real rollout worker and a plain HTTP client alternate in front of one server, with the same conversations, the same
request fields and the same number at once. The client keeps nothing; the worker records every turn and seals it.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
import orjson

from bench.harness.cluster import Cluster, start_cluster
from bench.harness.environments import user_message
from bench.harness.job_feed import JobFeed
from bench.harness.procfs import cpu_s
from bench.harness.progress import progress
from bench.harness.report import Report, Target, median
from bench.harness.vllm_server import model_name, vllm_url
from headpond.errors import RunError
from headpond.processes.child_process import ChildProcess
from headpond.turn import Message

SHARE_OF_DIRECT = 0.9
ENVIRONMENT = "conversation"
REQUEST_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """Conversations of `turns`, each turn with a user message and a completion of fixed length."""

    rounds: int
    conversations: int
    at_once: int
    turns: int = 3
    user_characters: int = 100
    completion_tokens: int = 64

    @property
    def sampling(self) -> dict[str, object]:
        return {"temperature": 1.0, "max_tokens": self.completion_tokens, "ignore_eos": True}

    def settings(self, url: str, model: str) -> str:
        return f"""
engine.urls = ["{url}"]
engine.model = "{model}"
policy.sampling = {{ max_tokens = {self.completion_tokens}, more = {{ ignore_eos = true }} }}
environments.{ENVIRONMENT}.use = "bench.harness.environments:Conversation"
environments.{ENVIRONMENT}.options = {{ turns = {self.turns}, user_tokens = {self.user_characters} }}
"""


FULL = Load(rounds=5, conversations=96, at_once=32)
QUICK = Load(rounds=1, conversations=4, at_once=2, turns=2, completion_tokens=8)


@dataclass(frozen=True, kw_only=True)
class Measured:
    turns_per_s: float
    cpu_ms: float
    """of the client's process, per turn"""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Headpond's side: a rollout worker and the feed of its jobs."""

    process: ChildProcess
    feed: JobFeed

    def measure(self, load: Load) -> Measured:
        started, before_s, goal = time.monotonic(), cpu_s(self.process.pid), self.feed.finished + load.conversations
        while (left := goal - self.feed.finished) > 0:
            if self.process.ended:
                raise RunError(f"the rollout worker ended:\n{self.process.output_tail}")
            self.feed.top_up(ENVIRONMENT, min(load.at_once, left))
        turns = load.conversations * load.turns
        return Measured(
            turns_per_s=turns / (time.monotonic() - started),
            cpu_ms=1000 * (cpu_s(self.process.pid) - before_s) / turns,
        )


def run(*, quick: bool) -> Report:
    load = QUICK if quick else FULL
    pairs: list[tuple[Measured, Measured]] = []
    with progress("engine-real") as show:
        show("starting vLLM and a rollout worker")
        with vllm_url() as url:
            model = model_name(url)
            with start_cluster() as cluster, ready(cluster, load, url, model) as worker:
                worker.measure(QUICK)
                measure_direct(QUICK, url, model)
                for number in range(load.rounds):
                    show(f"round {number + 1} of {load.rounds}")
                    pairs.append(_pair(number, worker, load, url, model))
    return _report(pairs, quick=quick)


def _pair(number: int, worker: Worker, load: Load, url: str, model: str) -> tuple[Measured, Measured]:
    """Through Headpond and directly; every other round begins with the second."""
    if number % 2:
        direct = measure_direct(load, url, model)
        return worker.measure(load), direct
    return worker.measure(load), measure_direct(load, url, model)


@contextmanager
def ready(cluster: Cluster, load: Load, url: str, model: str) -> Iterator[Worker]:
    cluster.configure(load.settings(url, model))
    process = cluster.rollout_worker(concurrency=load.at_once)
    cluster.wait_ready()
    yield Worker(process=process, feed=JobFeed(cluster=cluster))


def measure_direct(load: Load, url: str, model: str) -> Measured:
    started, before_s = time.monotonic(), time.process_time()
    asyncio.run(_converse(load, url, model))
    turns = load.conversations * load.turns
    return Measured(
        turns_per_s=turns / (time.monotonic() - started), cpu_ms=1000 * (time.process_time() - before_s) / turns
    )


async def _converse(load: Load, url: str, model: str) -> None:
    examples = iter(range(load.conversations))
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

        async def client() -> None:
            for example in examples:
                await _conversation(load, http, f"{url}/v1/chat/completions", model, example)

        async with asyncio.TaskGroup() as group:
            for _ in range(load.at_once):
                group.create_task(client())


async def _conversation(load: Load, http: aiohttp.ClientSession, url: str, model: str, example: int) -> None:
    messages: list[Message] = []
    for _ in range(load.turns):
        messages.append(user_message(example, load.user_characters))
        recorded = {"logprobs": True, "return_token_ids": True}
        request = {"model": model, "messages": messages, **load.sampling, **recorded}
        async with http.post(url, data=orjson.dumps(request), headers={"Content-Type": "application/json"}) as response:
            body = await response.read()
        if response.status != 200:
            raise RunError(f"{url} answered {response.status}: {body[:300].decode(errors='replace')}")
        message = orjson.loads(body)["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"]})


def _report(pairs: list[tuple[Measured, Measured]], *, quick: bool) -> Report:
    figures = dict[str, float]()
    for label, measured in zip(("through Headpond", "directly"), zip(*pairs, strict=True), strict=True):
        figures[f"{label}: turns a second"] = median([each.turns_per_s for each in measured])
        figures[f"{label}: client's CPU ms a turn"] = median([each.cpu_ms for each in measured])
    share = median([headpond.turns_per_s / direct.turns_per_s for headpond, direct in pairs])
    target = Target(name="turns a second, share of direct", value=share, limit=SHARE_OF_DIRECT, sense="at least")
    return Report(bench="engine-real", figures=figures, targets=[target], rounds=len(pairs), quick=quick)
