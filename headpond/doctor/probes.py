"""Short conversations with the engine, played and recorded as a rollout is, and read back from the recorded columns."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headpond.batches.manifest import TRUNCATIONS
from headpond.config.engine import AbsentRoutes, Engine, Policy
from headpond.doctor.findings import Finding, note, ok, wrong
from headpond.engines.dialects import dialect_of
from headpond.engines.dialects.base import altered_parameters
from headpond.environments.loading import LoadedEnvironment
from headpond.environments.protocol import Completion
from headpond.errors import NothingToTrain, PolicyFailure
from headpond.event_loop.offload import in_file_thread
from headpond.ids import GroupId, RolloutId
from headpond.playing.rollout import Attempt, PlayResources, play
from headpond.store import open_store
from headpond.store.columns import Columns, read_columns
from headpond.store.experts import Experts

RUN, STORE = "0" * 12, "memory://doctor"
PROBE_S = 300.0  # a conversation of a few tokens; a busy engine may queue it
QUESTION = "Count from one to twenty in words."
# Completions at each temperature, and their tokens. They suffice for a token to occur in one context at both
# temperatures, unless the policy is flat.
DRAWS, DRAWN = 4, 8
COLD, WARM = 0.5, 1.0
# Smaller differences between logprobs of one token in one context count as none: engines round and batch.
SAME = 1e-3
# A token above this is so likely that temperature hardly changes it.
CERTAIN = -0.02
# Unsets parameters that would change the distribution.
PLAIN: dict[str, Any] = dict.fromkeys(
    ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop")
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

Converse = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    columns: Columns
    routes: tuple[int, ...] | None  # rows, layers and top-k of the routed experts
    # tokens without a row, beside the last one of each sample, whose experts no engine has
    # computed
    unrouted: int
    seconds: float

    @property
    def samples(self) -> int:
        return len(self.columns.truncated)


class Script:
    """An environment whose only example is a conversation."""

    def __init__(self, converse: Converse) -> None:
        self._converse = converse

    async def rollout(self, example: Any, policy: Any) -> float:
        del example
        await self._converse(policy)
        return 0.0


async def record(resources: PlayResources, converse: Converse) -> Recorded:
    """Any error of the engine is raised in its own words."""
    # Absent routed experts are a finding of their own, not a response to be asked for again.
    engine = resources.dialect.settings.model_copy(update={"absent_routes": AbsentRoutes.MASK})
    dialect = dialect_of(engine, renderer=resources.dialect.renderer)
    resources = replace(resources, store=open_store(STORE), fields=(), dialect=dialect)
    environment: Any = Script(converse)
    loaded = LoadedEnvironment(name="doctor", environment=environment, examples=[None])
    rollout = str(RolloutId(str(GroupId(1)), 0))
    execution = f"{time.monotonic_ns():032x}"
    attempt = Attempt(run=RUN, rollout=rollout, attempt=1, execution=execution, seed=0, timeout_s=PROBE_S)
    started = time.monotonic()
    result = await play(resources, loaded, 0, attempt)
    seconds = time.monotonic() - started
    if result.policy_error:
        raise PolicyFailure(result.policy_error)
    if result.columns is None:
        raise NothingToTrain("the probe recorded nothing")

    def read() -> Recorded:
        assert result.columns is not None
        columns = read_columns(resources.store, result.columns)
        experts = Experts(resources.store, result.experts) if result.experts else None
        routed = int(experts.routed_valid.sum()) if experts else 0
        shape = tuple(experts.rows.shape) if experts else None
        for key in result.keys:
            resources.store.delete(key)
        unrouted = len(columns.input_ids) - len(columns.truncated) - routed
        return Recorded(columns=columns, routes=shape, unrouted=unrouted, seconds=seconds)

    return await in_file_thread(read)


async def draws(policy: Any) -> None:
    """Completions of one prompt at two temperatures: the prompt is in the cache from the second on."""
    for temperature in (WARM, COLD) * DRAWS:
        await policy.chat([_user(QUESTION)], max_tokens=DRAWN, temperature=temperature, **PLAIN)


def logprobs_mode(columns: Columns) -> str | None:
    """`processed` if a token's logprob depends on the temperature it was sampled at, `raw` if not; None if no token
    occurred at both temperatures that could tell."""
    drawn: dict[float, dict[tuple[int, ...], float]] = {}
    turns = columns.turns
    for start, end, temperature in zip(turns.start, turns.end, turns.temperature, strict=True):
        ids = columns.input_ids[start:end].tolist()
        for place, logprob in enumerate(columns.logprobs[start:end].tolist()):
            drawn.setdefault(float(temperature), {})[tuple(ids[: place + 1])] = logprob
    warm, cold = drawn.get(WARM, {}), drawn.get(COLD, {})
    common = [(warm[ids], cold[ids]) for ids in warm.keys() & cold.keys() if warm[ids] < CERTAIN]
    if not common:
        return None
    return "raw" if all(abs(one - other) < SAME for one, other in common) else "processed"


def check_sampling(policy: Policy, engine: Engine) -> Finding | None:
    """Find parameters that give the sampler another distribution than the trainer's."""
    altered = altered_parameters(policy.sampling.model_dump(exclude={"more"}) | policy.sampling.more)
    if penalties := sorted(altered.keys() - TRUNCATIONS):
        return note(
            "sampling",
            f"policy.sampling has {', '.join(penalties)}, which no engine records: ratios of all tokens are off",
            "remove them; `mb.sampling` is 2 on such tokens",
        )
    if altered and not engine.sampling_masks:
        return note(
            "sampling",
            f"policy.sampling has {', '.join(sorted(altered))}, and what is left is not recorded: ratios are off",
            'set engine.sampling_masks = true (vLLM: dialect = "generate" and --return-sampling-mask), or remove them; '
            "`mb.sampling` is 2 on such tokens",
        )
    if altered:
        return ok("sampling", f"the tokens that {', '.join(sorted(altered))} leave are recorded for the trainer")
    return None


def check_logprobs_mode(columns: Columns, configured: str, stated: Sequence[str] = ()) -> Finding:
    """Compare the mode with the configured one. `stated` has the servers' own statements, for a policy so flat or so
    certain that its tokens show nothing."""
    mode = logprobs_mode(columns) or next((each for each in stated if each != configured), next(iter(stated), None))
    if mode is None:
        return note("logprobs", "their mode could not be determined: no token was drawn at both temperatures")
    if mode == configured:
        return ok("logprobs", f"{mode}, as engine.logprobs_mode says")
    fixes = {
        "raw": "start vLLM with --logprobs-mode processed_logprobs (SGLang: unset SGLANG_RETURN_ORIGINAL_LOGPROB), or "
        'set engine.logprobs_mode = "raw" and train at temperature 1 only',
        "processed": 'set engine.logprobs_mode = "processed"',
    }
    return wrong(
        "logprobs",
        f"the engine's logprobs are {mode}: they do{' not' if mode == 'raw' else ''} depend on the temperature, and "
        f"engine.logprobs_mode is {configured!r}",
        fixes[mode],
    )


def check_routes(recorded: Recorded, resources: PlayResources) -> Finding:
    engine = resources.client.settings
    if not engine.routed_experts:
        if recorded.routes:
            _, layers, topk = recorded.routes
            text = f"the engine sends routed experts: {layers} layers, top {topk}"
            return note("experts", text, "set engine.routed_experts = true to use them")
        return ok("experts", "not requested")
    if recorded.routes is None:
        fix = "start it with --enable-return-routed-experts, or set engine.routed_experts = false"
        return wrong("experts", "engine.routed_experts = true, and the engine sends none", fix)
    _, layers, topk = recorded.routes
    if recorded.unrouted:
        tokens = len(recorded.columns.input_ids)
        text = f"{recorded.unrouted} of {tokens} tokens have no routed experts, or zeros in all layers"
        return note("experts", text, "check that the model is a mixture of experts and the engine's version")
    return ok("experts", f"{layers} layers, top {topk}, on a cached prefix too")


async def three_turns(policy: Any, *, tools: Sequence[dict[str, Any]] | None = None) -> None:
    messages: list[dict[str, Any]] = [_user("What is the weather in Oslo? Use the tool if you have one.")]
    for question in ("And in Rome?", "And in Lima?", ""):
        completion: Completion = await policy.chat(messages, tools=tools, max_tokens=64)
        messages.append(completion.message)
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in completion.tool_calls]
        messages += answers or [_user(question)]


async def call_with_tools(policy: Any) -> None:
    await policy.chat([_user("What is the weather in Oslo?")], tools=[WEATHER], max_tokens=1)


async def three_turns_with_tools(policy: Any) -> None:
    await three_turns(policy, tools=[WEATHER])


def check_turns(recorded: Recorded) -> Finding:
    if recorded.samples == 1:
        return ok("turns", "three turns are one sequence: each prompt extends the last")
    return note(
        "turns",
        f"three turns became {recorded.samples} sequences: a prompt does not repeat the tokens that were sampled, "
        "usually because the chat template drops thoughts or rewrites tool calls",
        'render prompts here (policy.renderer with engine.dialect = "generate" or "sglang"), which keeps them',
    )


async def short(policy: Any) -> None:
    await policy.chat([_user(QUESTION)], max_tokens=16)


def sampled(recorded: Recorded) -> int:
    return int(np.sum(recorded.columns.turns.end - recorded.columns.turns.start))


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
