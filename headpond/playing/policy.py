"""The policy of one rollout: each chat is sent to the engine and recorded in the rollout's session.

Enforces the limits on turns and context, and on chats at a time. Shares with the session server how a turn is made: the
prompt's tokens (`prompt_of`), a message decoded by the renderer, the adapter to ask for, and the metadata.
"""

import contextlib
import functools
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import orjson
import xxhash
from msgspec import structs

from headpond.config.engine import RESERVED, Policy
from headpond.engines.dialects import Dialect, Prompt
from headpond.engines.dialects.base import AsyncRenderer
from headpond.engines.http.client import EngineClient, Request, Response
from headpond.engines.http.transport import SESSION_HEADER
from headpond.engines.replicas.selection import Replica, Replicas
from headpond.engines.responses.continuation import (
    MAX_CONTINUATIONS,
    can_continue,
    continued_prompt,
    joined,
    open_sample_of,
    remaining,
)
from headpond.engines.responses.response import KEEP, RequestInfo, read_turn
from headpond.engines.responses.sampling_parameters import altered_sampling
from headpond.engines.weights.labels import START_VERSION, WeightLabel
from headpond.environments.protocol import Completion
from headpond.errors import (
    BadRequest,
    ContextFull,
    EngineUnreachable,
    HeadpondError,
    InfrastructureFailure,
    NotFound,
    PolicyFailure,
    Upstream,
)
from headpond.fields import TrainerField
from headpond.ids import engine_session
from headpond.recording import Prepared, Session
from headpond.renderers import NextTurn
from headpond.renderers.protocol import NO_VALUES, TemplateValues, Tools, begins_with
from headpond.replica_use import Usage
from headpond.spans import Stopwatch
from headpond.turn import (
    HIT_MAX_TOKENS,
    Ids,
    Mask,
    Message,
    OpenSample,
    RouteFormat,
    SaidVersion,
    Turn,
    TurnMetadata,
)

TEMPLATE_VALUES = "chat_template_kwargs"
Exchanged = Response[tuple[Turn, Message | None]]
"""A response, read; without a message from token-in/token-out."""


class RecordedPolicy:
    def __init__(
        self,
        client: EngineClient,
        session: Session,
        settings: Policy,
        dialect: Dialect,
        *,
        seed: int = 0,
        fields: tuple[TrainerField, ...] = (),
    ) -> None:
        self._client = client
        self._session = session
        self._settings = settings
        self._dialect = dialect
        self._seed = seed
        self._fields = tuple(field.name for field in fields if field.source == "turn")
        self.turn_fields: dict[int, dict[str, Any]] = {}
        """`Completion.fields` of each turn that the environment received."""
        self._sampling = {**settings.sampling.model_dump(exclude={"more"}), **settings.sampling.more}
        self._last_replica: Replica | None = None
        self.engine_s = 0.0
        """Time spent waiting for the engine."""
        self.failures = 0
        """Failed attempts that were retried."""
        self.aborts = 0
        """Answers that the engine aborted: continued, or asked for again."""
        self.usage = Usage()
        """Of the replicas."""
        self._engine_failed = False
        self._recorded_tokens = 0

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        agent: str = "",
        train: bool = True,
        **sampling: Any,
    ) -> Completion:
        """One turn. `train=False` excludes the completion from the loss. Pass None to unset a sampling default."""
        await self._session.place()
        if self._session.begun >= self._settings.max_turns:
            raise PolicyFailure(
                f"turn limit: the rollout has used its {self._settings.max_turns} turns (policy.max_turns)"
            )
        messages, fields = list(messages), self._sampling_fields(sampling)
        with self._session.claim() as claim, _classified_failures():
            prepared = self._session.prepare(claim, messages, agent=agent)
            restored = await self._session.restored(prepared, messages)
            prompt = await prompt_of(self._dialect.renderer, prepared, restored, tools=tools, fields=fields)
            if prompt.ids is not None:
                fields.pop(TEMPLATE_VALUES, None)
            request = Stopwatch()
            response = await self._send(prepared, prompt, fields)
            request.stop()
            turn, message = await self._with_rendered_message(prepared, prompt, fields, *response.value)
            metadata = _metadata(response, fields, request, agent=agent, train=train)
            recorded = await self._session.commit(claim, prepared, turn, metadata, seen=False)
            self._recorded_tokens += len(turn.completion_ids)
        if not recorded or claim.turn is None:
            raise NotFound(f"rollout {self._session.settings.rollout} has ended: its session records no more turns")
        self._session.see(claim.turn)
        if turn.overlong_prompt:
            raise PolicyFailure(
                f"context limit: the prompt has more than {self._settings.max_seq_len} tokens (policy.max_seq_len)"
            )
        return Completion(
            message=message,
            finish_reason=turn.finish_reason or "",
            truncated=turn.truncated,
            token_ids=turn.completion_ids,
            fields=self.turn_fields.setdefault(prepared.arrival, {}),
        )

    def discarded(self, error: BaseException) -> None:
        """The rollout ends with `error`, and all of its tokens are thrown away. If the engine failed, they count as a
        cost of the replica that had sampled them."""
        if self._last_replica and (self._engine_failed or isinstance(error, EngineUnreachable)):
            self.usage.lost(self._last_replica.url, self._recorded_tokens)
        if isinstance(error, HeadpondError):
            error.replica_uses = self.usage.by_replica

    def sample_ids(self) -> list[Ids]:
        """The tokens of each sample so far: the layout of `Score.columns`."""
        return self._session.sample_ids()

    async def _send(self, prepared: Prepared, prompt: Prompt, sampling: Mapping[str, Any]) -> Exchanged:
        """The engine's answer. An aborted one is continued if possible: the parts become one turn."""
        continues = can_continue(prompt, sampling)
        open_samples, route_format = prepared.open_samples, prepared.route_format
        arrival = prepared.arrival
        seeded = self._seeded(sampling, arrival)
        response = await self._exchange(prompt, seeded, open_samples, route_format, continues=continues)
        continuations = 0
        while (turn := response.value[0]).aborted:
            self.aborts += 1
            rest_sampling = remaining(sampling, len(turn.completion_ids))
            if turn.truncated or rest_sampling is None:  # it has all the tokens that it may have
                whole = structs.replace(turn, aborted=False, finish_reason=HIT_MAX_TOKENS, message=None)
                return replace(response, value=(whole, None))
            continuations += 1
            if continuations > MAX_CONTINUATIONS:
                raise InfrastructureFailure(f"the engine aborted one completion {continuations} times: {KEEP}")
            sample = open_sample_of(turn, open_samples)
            rest = await self._exchange(
                continued_prompt(prompt, turn, sample),
                self._seeded(rest_sampling, arrival, continuation=continuations),
                [sample],
                turn.routes.format if turn.routes else route_format,
                continues=True,
            )
            response = _joined(response, rest)
        return response

    async def _exchange(
        self,
        prompt: Prompt,
        sampling: Mapping[str, Any],
        open_samples: Sequence[OpenSample],
        route_format: RouteFormat,
        *,
        continues: bool,
    ) -> Exchanged:
        session = self._session.settings
        model, version = await named_adapter(self._dialect, self._client.replicas)
        request = Request(
            dialect=self._dialect,
            body=self._dialect.request_body(prompt, sampling, model=model),
            version=version,
            headers={SESSION_HEADER: engine_session(session.rollout, session.attempt)},
        )
        info = RequestInfo(
            dialect=self._dialect,
            prompt_ids=prompt.ids,
            routes_from=prompt.routes_from,
            max_seq_len=self._settings.max_seq_len,
            fields=self._fields,
            renders=prompt.ids is not None,
            continues=continues,
        )
        read = functools.partial(read_turn, open_samples=open_samples, request=info, route_format=route_format)
        started = time.monotonic()
        try:
            response = await self._client.send(
                request, lambda body: _with_message(read(body)), preferred=self._last_replica, usage=self.usage
            )
        except InfrastructureFailure:
            self._engine_failed = True
            raise
        finally:
            self.engine_s += time.monotonic() - started
        count_use(self.usage, response.replica, self._last_replica, response.value[0], response.seconds)
        self._last_replica = response.replica
        self.failures += response.failures
        self.aborts += response.aborts
        return response

    async def _with_rendered_message(
        self, prepared: Prepared, prompt: Prompt, fields: Mapping[str, Any], turn: Turn, message: Message | None
    ) -> tuple[Turn, Message]:
        if message is not None:
            return turn, message
        message = await rendered_message(self._dialect, prompt, turn, number=prepared.arrival, fields=fields)
        return structs.replace(turn, message=orjson.dumps(message)), message

    def _sampling_fields(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        if refused := sorted(RESERVED & overrides.keys()):
            raise BadRequest(f"{', '.join(refused)}: Headpond sets these fields; remove them from the chat call")
        return {name: value for name, value in {**self._sampling, **overrides}.items() if value is not None}

    def _seeded(self, sampling: Mapping[str, Any], arrival: int, *, continuation: int = 0) -> dict[str, Any]:
        return {**sampling, "seed": self._turn_seed(arrival, continuation)} if self._settings.seeded else dict(sampling)

    def _turn_seed(self, arrival: int, continuation: int) -> int:
        """Depends on the rollout and the number of the request, not on the attempt. A continuation must not draw what
        its beginning drew."""
        text = f"{self._session.settings.rollout}/{arrival}{f'/{continuation}' if continuation else ''}"
        return xxhash.xxh3_64_intdigest(text.encode(), seed=self._seed & 0xFFFF_FFFF) & 0x7FFF_FFFF


def count_use(usage: Usage, replica: Replica, before: Replica | None, turn: Turn, seconds: float) -> None:
    """A conversation that left the replica `before` had its prompt computed again."""
    usage.answered(replica.url, tokens=len(turn.completion_ids), seconds=seconds)
    if before not in (None, replica):
        usage.lost(before.url, turn.prefix_tokens)


@contextlib.contextmanager
def _classified_failures() -> Generator[None]:
    """Raise PolicyFailure or InfrastructureFailure in place of session errors."""
    try:
        yield
    except ContextFull as error:
        raise PolicyFailure(f"context limit: {error}") from error
    except Upstream as error:
        raise InfrastructureFailure(str(error)) from error


def _joined(first: Exchanged, rest: Exchanged) -> Exchanged:
    """Parts that state no versions of their tokens are like one response: if their replica said the same before each,
    what it says after the last decides. Otherwise, or if other weights may have been between them, theirs are a range.
    """
    turn, parts = joined(first.value[0], rest.value[0]), (first, rest)
    stated = [part.value[0].version for part in parts if part.value[0].version is not None]
    before = [part.version.version for part in parts]
    exact = all(part.version.exact for part in parts) and len({*before, *stated}) == 1 and _same_server(first, rest)
    return replace(
        rest,
        value=(structs.replace(turn, version=rest.value[0].version if exact else max(before + stated)), None),
        version=SaidVersion(min(before), exact=exact),
    )


def _same_server(first: Exchanged, rest: Exchanged) -> bool:
    """One replica, which cannot have restarted in between: nothing has failed there since the first response."""
    since = first.answered_at
    return first.replica is rest.replica and (since is None or first.replica.doubted_at < since)


def _with_message(turn: Turn) -> tuple[Turn, Message | None]:
    """The turn and its message, checked as far as environments rely on it. Empty fields are removed: not every engine
    accepts them in the next request."""
    if turn.message is None:
        return turn, None
    decoded: Message = orjson.loads(turn.message)
    given = {name: value for name, value in decoded.items() if value}
    content = None if decoded.get("tool_calls") else ""
    message: Message = {"role": "assistant", "content": content, **given}
    for call in message.get("tool_calls") or []:
        function = call.get("function")
        if not isinstance(function, dict) or not all(
            isinstance(function.get(key), str) for key in ("name", "arguments")
        ):
            raise Upstream("the engine's message has a tool call without a name or without arguments in a string")
    return turn, message


def _metadata(
    response: Exchanged, sampling: Mapping[str, Any], request: Stopwatch, *, agent: str, train: bool
) -> TurnMetadata:
    turn, _ = response.value
    return turn_metadata(
        sampling,
        response.replica,
        version=response.version,
        answered_at=response.answered_at,
        request=request,
        agent=agent,
        completion_mask=None if train else np.zeros(len(turn.completion_ids), np.uint8),
    )


async def prompt_of(
    renderer: AsyncRenderer | None,
    prepared: Prepared,
    messages: Sequence[Message],
    *,
    tools: Tools,
    fields: Mapping[str, Any],
) -> Prompt:
    """The prompt of a request with these `fields`. With a renderer it has tokens: recorded ones are reused and only
    appended messages are tokenized, unless the renderer cannot extend the previous turn."""
    if renderer is None:
        return Prompt(messages=messages, tools=tools)
    values = fields.get(TEMPLATE_VALUES) or NO_VALUES
    if not isinstance(values, Mapping):
        raise BadRequest(f"{TEMPLATE_VALUES} must be an object")
    ids = await _prompt_ids(renderer, prepared, messages, tools, cast("TemplateValues", values))
    kept = begins_with(ids, prepared.history_ids)
    return Prompt(
        messages=messages,
        tools=tools,
        ids=ids,
        values=cast("TemplateValues", values),
        routes_from=prepared.routes_from if kept else 0,
        rewritten=not kept,
    )


async def _prompt_ids(
    renderer: AsyncRenderer, prepared: Prepared, messages: Sequence[Message], tools: Tools, values: TemplateValues
) -> Ids:
    history_ids, answer_from = prepared.history_ids, prepared.answer_from
    turn = NextTurn(
        messages=messages,
        tools=tools,
        prompt_ids=history_ids[:answer_from],
        completion_ids=history_ids[answer_from:],
        appended=len(prepared.request.appended),
        values=values,
    )
    return np.ascontiguousarray(await renderer.prompt_ids(turn), np.int32)


async def rendered_message(
    dialect: Dialect, prompt: Prompt, turn: Turn, *, number: int, fields: Mapping[str, Any]
) -> Message:
    """The completion of a turn without a message (token-in/token-out), decoded by the renderer. The turn's number in
    its session makes the ids of its tool calls unique there; `fields` are those of the request."""
    if dialect.renderer is None or prompt.ids is None:
        raise Upstream("the engine's response has no message, and there is no policy.renderer to make one")
    rendered = await dialect.renderer.message(
        turn.completion_ids, prompt_ids=prompt.ids, tools=prompt.tools, values=prompt.values
    )
    rendered = _stopped(rendered, fields.get("stop"))
    if calls := rendered.get("tool_calls"):
        numbered = [{"id": f"call_{number}_{position}", **call} for position, call in enumerate(calls)]
        rendered = {**rendered, "tool_calls": numbered}
    return {"role": "assistant", **rendered}


def _stopped(message: Message, stop: object) -> Message:
    """The message without a string that ended it, and what its token has behind that."""
    content, strings = message.get("content"), [stop] if isinstance(stop, str) else stop
    if not isinstance(content, str) or not isinstance(strings, list | tuple):
        return message
    found = [content.find(each) for each in cast("Sequence[object]", strings) if isinstance(each, str) and each]
    ends = [at for at in found if at >= 0]
    return {**message, "content": content[: min(ends)]} if ends else message


async def named_adapter(
    dialect: Dialect, replicas: Replicas, model: str | None = None
) -> tuple[str | None, SaidVersion | None]:
    """The model that a request names, and the version that this makes sure of; None where weights are not adapters.
    `model` is what the caller names: another than the policy's is kept, and its version is known if the run has loaded
    it. A request that names no adapter is answered by the model without one, also if the first was loaded meanwhile."""
    policy, adapter_model = dialect.settings.model, dialect.control.adapter_model
    if model and model != policy:
        label = WeightLabel.parse(model.rpartition(":")[2])
        known = replicas.has_loaded(label) and adapter_model(policy, label.text) == model
        return model, SaidVersion(label.version if known else START_VERSION, exact=known) if replicas.lora else None
    label = await replicas.adapter()
    if label is None:
        return None, SaidVersion(START_VERSION, exact=True) if replicas.lora else None
    return adapter_model(policy, label.text), SaidVersion(label.version, exact=True)


def turn_metadata(
    sampling: Mapping[str, Any],
    replica: Replica,
    *,
    version: SaidVersion,
    answered_at: float | None,
    request: Stopwatch,
    agent: str = "",
    completion_mask: Mask | None = None,
) -> TurnMetadata:
    """`sampling` are the fields of the request; `request` took its time."""
    temperature = sampling.get("temperature")
    return TurnMetadata(
        agent=agent,
        engine=replica.url,
        version=version,
        answered_at=answered_at,
        begun_at=request.begun_at,
        seconds=request.seconds,
        temperature=1.0 if temperature is None else float(temperature),
        sampling=altered_sampling(sampling),
        completion_mask=completion_mask,
    )
