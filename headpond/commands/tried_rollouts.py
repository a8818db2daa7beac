"""The rollouts of `headpond try`: played like those of a worker, and described."""

import asyncio
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from headpond.commands import facts
from headpond.commands.facts import Fact
from headpond.commands.output import print_facts
from headpond.commands.transcript import message_parts
from headpond.config import RunConfig
from headpond.engines.replicas.control import UNREACHABLE, EngineControl, WeightLabel
from headpond.environments.loading import BUILT_INS, LoadedEnvironment, runs_own_agent
from headpond.errors import ConfigError, HeadpondError, StageError
from headpond.event_loop.offload import in_file_thread
from headpond.ids import GroupId, RolloutId
from headpond.processes.child_process import ChildProcess, listening_port
from headpond.records.rollout import RolloutResult
from headpond.store import Store, open_store
from headpond.store.columns import read_columns
from headpond.tasks.player import Player
from headpond.tasks.stages.play import PlayMessage, play_in

AT_ONCE = 8  # rollouts: enough to keep a small engine busy, few enough to read
SHOWN_CHARACTERS = 2000  # of one message; --json has all of it
SHOWN_IDS = 8
MARKS = {"thoughts": "(thinks) ", "text": "", "call": "calls "}
# Name of the run. If the engine has weights that a run has loaded, its name is used: replicas serve that run only.
RUN = "0" * 12


@dataclass(kw_only=True)
class TriedRollout:
    environment: str
    example: int
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    policy_error: str | None = None  # why the policy failed; such a rollout is trained on
    error: str | None = None  # why there is no result
    traceback: str | None = None  # traceback of the environment's own exception
    # the messages of each sample; without a result, of each request and its completion
    conversations: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Trial:
    def __init__(self, settings: RunConfig, names: Sequence[str], examples: range) -> None:
        self._settings = settings
        self._names = names
        self._examples = examples
        self.weights: dict[str, WeightLabel] = {}  # replica -> label of its weights

    async def play(self, *, print_as_played: bool) -> list[TriedRollout]:
        """Play all. Results keep the order of environments and examples."""
        self.weights = await _weights(self._settings)
        if print_as_played:
            print_facts(_weight_facts(self.weights))
        slots = asyncio.Semaphore(AT_ONCE)
        async with Player(self._settings).ready() as player, asyncio.TaskGroup() as group:
            player.check()
            wanted = [
                (name, example)
                for name in self._names or player.environments
                for example in self._examples
                if example < player.environments[name].size
            ]
            playing = [
                group.create_task(self._play_one(player, name, example, number, slots))
                for number, (name, example) in enumerate(wanted, 1)
            ]
            print(f"playing {facts.counted(len(playing), 'rollout')}", file=sys.stderr)
            for task in playing:
                rollout = await task
                if print_as_played:
                    print_facts(_rollout_facts(rollout))
        return [task.result() for task in playing]

    async def _play_one(
        self, player: Player, name: str, example: int, number: int, slots: asyncio.Semaphore
    ) -> TriedRollout:
        tried = TriedRollout(environment=name, example=example)
        heard: list[list[dict[str, Any]]] = []
        environment = _overheard(player.environments[name], heard)
        async with slots:
            try:
                result = await play_in(player, environment, self._job(name, example, number), f"{number:032x}")
            except HeadpondError as error:
                tried.error, tried.conversations = str(error), heard
                if isinstance(error, StageError) and error.__cause__ is not None:
                    tried.traceback = "".join(traceback.format_exception(error.__cause__))
                return tried
        await in_file_thread(_describe, tried, result, open_store(self._settings.store_url))
        return tried

    def _job(self, name: str, example: int, number: int) -> PlayMessage:
        return PlayMessage(
            run=next((label.run for label in self.weights.values() if label.run), RUN),
            job=str(RolloutId(str(GroupId(number)), 0)),
            attempt=1,
            sequence=number,
            environment=name,
            example=example,
            seed=self._settings.seed,
            timeout_s=self._settings.rollouts.timeout_s,
        )


async def _weights(settings: RunConfig) -> dict[str, WeightLabel]:
    """Map each replica that reports its weights -> their label."""
    weights: dict[str, WeightLabel] = {}
    if settings.engine.versions == "reported":
        async with EngineControl.open(settings.engine) as control:
            for url in settings.engine.urls:
                with contextlib.suppress(*UNREACHABLE):
                    label = await control.label(url)
                    weights |= {url: label} if label else {}
    return weights


def _weight_facts(weights: Mapping[str, WeightLabel]) -> Iterator[Fact]:
    for url, label in weights.items():
        named = f"version {label.version} ({label.text!r})" if label.numbered else f"its first weights ({label.text!r})"
        yield Fact("weights", f"{url} has {named}")


class Wrapped:
    """An object with some of its methods replaced."""

    def __init__(self, inner: Any, **methods: Any) -> None:
        self._inner = inner
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _overheard(loaded: LoadedEnvironment, heard: list[list[dict[str, Any]]]) -> LoadedEnvironment:
    """Note each request with its completion, so that a failed rollout can be shown. An external agent's policy is a
    URL, so nothing is noted."""
    if loaded.external_agent:
        return loaded

    async def rollout(example: Any, policy: Any) -> Any:
        async def chat(messages: Sequence[dict[str, Any]], **options: Any) -> Any:
            heard.append(list(messages))
            completion = await policy.chat(messages, **options)
            heard[-1].append(completion.message)
            return completion

        return await loaded.environment.rollout(example, Wrapped(policy, chat=chat))

    return replace(loaded, environment=Wrapped(loaded.environment, rollout=rollout))


def chosen(settings: RunConfig, wanted: Sequence[str]) -> list[str]:
    known = [*(settings.environments or BUILT_INS), *settings.evaluation]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"--environment {unknown[0]}: the configuration has only {', '.join(known)}")
    return list(wanted)


def needs_sessions(settings: RunConfig, names: Sequence[str]) -> bool:
    """Whether an environment runs an agent of its own and no session server is configured."""
    uses = {name: each.use for name, each in settings.environments.items()} or {name: name for name in BUILT_INS}
    uses |= {name: each.use for name, each in settings.evaluation.items()}
    return not settings.sessions.urls and any(runs_own_agent(uses[name]) for name in names or uses)


@contextlib.contextmanager
def session_server(config: Path | None, directory: Path, store: str) -> Iterator[str]:
    """A session server for the trial alone; its URL."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("HEADPOND_")}
    arguments = [str(config.resolve())] if config else []
    server = ChildProcess(
        "sessions",
        ["headpond", "sessions", *arguments, "--host", "127.0.0.1", "--port", "0", "--store", store],
        directory=directory,
        variables=variables,
    )
    try:
        yield f"http://127.0.0.1:{listening_port(server)}"
    finally:
        server.kill()


def _describe(tried: TriedRollout, result: RolloutResult, store: Store) -> None:
    tried.reward, tried.rewards, tried.metrics = result.reward, result.rewards, result.metrics
    tried.policy_error = result.policy_error
    if result.columns is None:
        return
    columns = read_columns(store, result.columns)
    tried.conversations = orjson.loads(columns.conversation.tobytes())
    for start, end in zip(columns.sample_offsets[:-1].tolist(), columns.sample_offsets[1:].tolist(), strict=True):
        trained = columns.loss_mask[start:end].astype(bool)
        logprobs = columns.logprobs[start:end][trained]
        tried.samples.append(
            {
                "tokens": end - start,
                "trained": int(trained.sum()),
                "mean_logprob": float(logprobs.mean()) if len(logprobs) else None,
                "last_ids": columns.input_ids[max(start, end - SHOWN_IDS) : end].tolist(),
            }
        )


def _rollout_facts(rollout: TriedRollout) -> Iterator[Fact]:
    yield Fact("", "")
    yield Fact(rollout.environment, f"example {rollout.example}")
    for number, conversation in enumerate(rollout.conversations):
        if len(rollout.conversations) > 1:
            yield Fact("sample", f"{number + 1} of {len(rollout.conversations)}")
        for message in conversation:
            yield from _message_facts(message)
    for sample in rollout.samples:
        logprob = f", mean logprob {sample['mean_logprob']:.3f}" if sample["mean_logprob"] is not None else ""
        ids = " ".join(map(str, sample["last_ids"]))
        yield Fact("tokens", f"{sample['tokens']:,}, {sample['trained']:,} of them trained{logprob}; the last: {ids}")
    if len(rollout.samples) > 1:
        yield Fact("", f"{len(rollout.samples) - 1} prompts did not extend the sequence before them", alarm=True)
    if rollout.metrics:
        yield Fact("metrics", ", ".join(f"{name} {value:g}" for name, value in rollout.metrics.items()))
    if rollout.policy_error:
        yield Fact("policy", rollout.policy_error, alarm=True)
    if rollout.reward is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in rollout.rewards.items())
        yield Fact("reward", f"{rollout.reward:g}" + (f" ({parts})" if parts else ""))
    if rollout.traceback:
        yield Fact("traceback", rollout.traceback.rstrip(), alarm=True)
    if rollout.error:
        yield Fact("failed", rollout.error, alarm=True)


def _message_facts(message: dict[str, Any]) -> Iterator[Fact]:
    for kind, text in list(message_parts(message)) or [("text", "(no content)")]:
        yield Fact(message["role"], MARKS[kind] + _shortened(text))


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ... ({len(text):,} characters)"


def totals(played: Sequence[TriedRollout]) -> Iterator[Fact]:
    rewards = [rollout.reward for rollout in played if rollout.reward is not None]
    failed = sum(rollout.error is not None for rollout in played)
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    yield Fact("", "")
    yield Fact("played", f"{facts.counted(len(played), 'rollout')}{mean}, {failed} failed", alarm=bool(failed))
