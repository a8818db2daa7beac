"""The examination of an engine: the quick part of every start, and all of it for `headpond doctor`."""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headpond.config import RunConfig
from headpond.doctor import probes
from headpond.doctor.findings import Finding, note, ok, problems, wrong
from headpond.doctor.server_facts import (
    ServerFacts,
    check_control,
    check_kind,
    check_length,
    check_model,
    check_shape,
    read_facts,
)
from headpond.engines.http.client import EngineClient
from headpond.errors import ConfigError, EngineUnreachable, HeadpondError, InfrastructureFailure, StageError
from headpond.playing.rollout import PlayResources, open_dialect
from headpond.store import open_store

LATENCIES = 3
AT_ONCE = 8
TOOL_FLAGS = "start vLLM with --enable-auto-tool-choice --tool-call-parser NAME (SGLang: --tool-call-parser NAME)"


async def quick(resources: PlayResources) -> list[Finding]:
    """StageError, in the engine's words, if every rollout would fail or be spoilt; returns what fails only some.
    EngineUnreachable if no replica answers; other replicas are left to the requests, which avoid what does not
    answer."""
    settings, unreachable, stated = resources.client.settings, list[str](), list[str]()
    for url in settings.urls:
        try:
            facts = await read_facts(settings, url)
        except EngineUnreachable as error:
            unreachable.append(str(error))
            continue
        checks = [check_model(facts, settings), *check_kind(facts, settings), *check_shape(facts, settings)]
        if found := problems([*checks, *check_control(facts, settings)]):
            raise StageError(found[0].sentence)
        stated += [mode] if (mode := facts.logprobs_mode) else []
    if len(unreachable) == len(settings.urls):
        raise EngineUnreachable(unreachable[0])
    recorded = await probes.record(resources, probes.draws)
    checks = [probes.check_logprobs_mode(recorded.columns, settings.logprobs_mode, stated)]
    if found := problems([*checks, probes.check_routes(recorded, resources)]):
        raise StageError(found[0].sentence)
    try:
        await probes.record(resources, probes.call_with_tools)
    except EngineUnreachable:
        raise
    except HeadpondError as error:
        return [refused_tools(error)]
    return []


def refused_tools(error: HeadpondError) -> Finding:
    """Not every environment has tools, so this alone stops no run. Only a server that refuses them needs a flag."""
    flags = TOOL_FLAGS if isinstance(error, InfrastructureFailure) else ""
    return note("tools", f"environments with tools fail: {error}", flags)


@dataclass
class Examination:
    """Iterate over `findings`, then read the rest."""

    config: RunConfig
    facts: list[ServerFacts] = field(default_factory=list[ServerFacts])
    routes: tuple[int, ...] | None = None
    mode: str | None = None

    async def findings(self) -> AsyncIterator[Finding]:
        for url in self.config.engine.urls:
            for finding in await self._server(url):
                yield finding
        if not self.facts:
            return
        # The probes use what was found, so that one wrong setting does not hide the next.
        update = {"urls": (self.facts[0].url,), "model": self._model, "dialect": self._dialect, "retries": 0}
        reached = self.config.engine.model_copy(update=update)
        if sampling := probes.check_sampling(self.config.policy, self.config.engine):
            yield sampling
        try:
            dialect = await open_dialect(self.config.model_copy(update={"engine": reached}))
        except ConfigError as error:
            yield wrong("dialect", str(error))
            return
        async with EngineClient.open(reached) as client:
            store, policy = open_store(probes.STORE), self.config.policy
            resources = PlayResources(client=client, store=store, settings=policy, dialect=dialect)
            async for finding in self._recorded(resources):
                yield finding

    async def _server(self, url: str) -> list[Finding]:
        engine = self.config.engine
        try:
            facts = await read_facts(engine, url)
        except EngineUnreachable as error:
            return [wrong("server", str(error))]
        self.facts.append(facts)
        flags = ", ".join(f"{name} {value}" for name, value in sorted(facts.flags.items()))
        return [
            *check_kind(facts, engine),
            check_model(facts, engine),
            *check_length(facts, engine, self.config.policy.max_seq_len),
            *check_shape(facts, engine),
            *([ok("flags", flags)] if flags else []),
            *check_control(facts, engine),
        ]

    async def _recorded(self, resources: PlayResources) -> AsyncIterator[Finding]:
        try:
            drawn = await probes.record(resources, probes.draws)
        except HeadpondError as error:
            yield wrong("tokens", f"nothing can be recorded: {error}")
            return
        stated = [mode for facts in self.facts if (mode := facts.logprobs_mode)]
        self.routes, self.mode = drawn.routes, probes.logprobs_mode(drawn.columns) or next(iter(stated), None)
        yield ok("tokens", "ids and logprobs of every sampled token are recorded")
        yield probes.check_logprobs_mode(drawn.columns, resources.client.settings.logprobs_mode, stated)
        yield probes.check_routes(drawn, resources)
        async for finding in self._turns(resources):
            yield finding
        yield await self._speed(resources)

    async def _turns(self, resources: PlayResources) -> AsyncIterator[Finding]:
        try:
            recorded = await probes.record(resources, probes.three_turns_with_tools)
            yield ok("tools", "requests with tools are answered")
        except HeadpondError as error:
            yield refused_tools(error)
            try:
                recorded = await probes.record(resources, probes.three_turns)
            except HeadpondError as without:
                yield wrong("turns", f"a conversation of three turns fails: {without}")
                return
        yield probes.check_turns(recorded)

    async def _speed(self, resources: PlayResources) -> Finding:
        try:
            single = [await probes.record(resources, probes.short) for _ in range(LATENCIES)]
            started = time.monotonic()
            many = await asyncio.gather(*(probes.record(resources, probes.short) for _ in range(AT_ONCE)))
        except HeadpondError as error:
            return wrong("speed", f"{AT_ONCE} requests at once fail: {error}")
        passed = time.monotonic() - started
        latency = statistics.median(each.seconds for each in single)
        tokens = sum(map(probes.sampled, many)) / passed
        text = f"{latency:.2f} s for a completion of {probes.sampled(single[0])} tokens"
        return ok("speed", f"{text}; {AT_ONCE} at once: {AT_ONCE / passed:.1f} turns/s, {tokens:.0f} tokens/s")

    @property
    def _model(self) -> str:
        served, configured = self.facts[0].models, self.config.engine.model
        return configured if configured in served or not served else next(iter(served))

    @property
    def _dialect(self) -> str:
        kind, configured = self.facts[0].kind, self.config.engine.dialect
        if kind == "sglang" and configured in ("vllm", "generate"):
            return "sglang"
        return "vllm" if kind == "vllm" and configured == "sglang" else configured

    @property
    def shorter_sequences(self) -> int | None:
        """Return the server's longest sequence, if it is shorter than `policy.max_seq_len`."""
        lengths = [longest for facts in self.facts if (longest := facts.models.get(self._model)) is not None]
        return min((longest for longest in lengths if longest < self.config.policy.max_seq_len), default=None)

    def block(self) -> str:
        """Write the `[engine]` section for `headpond init --engine`, from the facts."""
        urls = ", ".join(json.dumps(facts.url) for facts in self.facts)
        lines = ["[engine]", f"urls = [{urls}]", f"model = {json.dumps(self._model)}"]
        lines.append(f"dialect = {json.dumps(self._dialect)}")
        if self.mode:
            lines.append(f"logprobs_mode = {json.dumps(self.mode)}")
        if self.routes:
            _, layers, topk = self.routes
            lines += ["routed_experts = true", f"hidden_layers = {layers}", f"experts_per_token = {topk}"]
        return "\n".join(lines)
