"""The policy of one rollout: each chat is sent to the engine and recorded in the rollout's session.

It enforces the limits on turns, context and concurrent chats. The session server makes turns
with the same functions: the prompt's tokens (`prompt_of`), the rendered message, the adapter's
name and the metadata.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import orjson
import xxhash
from msgspec import structs

from headpond.config.engine import RESERVED, Policy
from headpond.engines.dialects import Dialect, Prompt
from headpond.engines.dialects.base import altered_sampling
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
from headpond.engines.weights import START_VERSION, WeightLabel
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
from headpond.renderers import NextTurn, PooledRenderer
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
"""A response that has been read. Token-in/token-out responses have no message."""


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
        """Completions that the engine aborted. They were continued, or requested again."""
        self.usage = Usage()
        """Use of each replica."""
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
        """Play one turn. `train=False` excludes the completion from the loss. Pass None to unset
        a sampling default."""
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
            turn, message = response.value
            if message is None:
                number = prepared.arrival
                message = await rendered_message(self._dialect, prompt, turn, number=number, fields=fields)
                turn = structs.replace(turn, message=orjson.dumps(message))
            metadata = turn_metadata(
                fields,
                response.replica,
                version=response.version,
                answered_at=response.answered_at,
                request=request,
                agent=agent,
                completion_mask=None if train else np.zeros(len(turn.completion_ids), np.uint8),
            )
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
        """Count the cost of a rollout that ends with `error`: all of its tokens are thrown away.
        If the engine failed, they count for the replica that had sampled them."""
        if self._last_replica and (self._engine_failed or isinstance(error, EngineUnreachable)):
            self.usage.lost(self._last_replica.url, self._recorded_tokens)
        if isinstance(error, HeadpondError):
            error.replica_uses = self.usage.by_replica

    def sample_ids(self) -> list[Ids]:
        """Return the tokens of each sample so far: the layout of `Score.columns`."""
        return self._session.sample_ids()

    async def _send(self, prepared: Prepared, prompt: Prompt, sampling: Mapping[str, Any]) -> Exchanged:
        """Return the engine's response. An aborted one is continued if possible: the parts
        become one turn."""
        continues = functools.partial(can_continue, prompt, sampling)
        open_samples, route_format = prepared.open_samples, prepared.route_format
        arrival = prepared.arrival
        seeded = self._seeded(sampling, arrival)
        response = await self._exchange(prompt, seeded, open_samples, route_format, continues=continues)
        continuations = 0
        while (turn := response.value[0]).aborted:
            self.aborts += 1
            remaining_sampling = remaining(sampling, len(turn.completion_ids))
            if turn.truncated or remaining_sampling is None:  # The completion has all its tokens.
                whole = structs.replace(turn, aborted=False, finish_reason=HIT_MAX_TOKENS, message=None)
                return replace(response, value=(whole, None))
            continuations += 1
            if continuations > MAX_CONTINUATIONS:
                raise InfrastructureFailure(f"the engine aborted one completion {continuations} times: {KEEP}")
            sample = open_sample_of(turn, open_samples)
            continuation = await self._exchange(
                continued_prompt(prompt, turn, sample),
                self._seeded(remaining_sampling, arrival, continuation=continuations),
                [sample],
                turn.routes.format if turn.routes else route_format,
                continues=lambda: True,
            )
            response = _joined(response, continuation)
        return response

    async def _exchange(
        self,
        prompt: Prompt,
        sampling: Mapping[str, Any],
        open_samples: Sequence[OpenSample],
        route_format: RouteFormat,
        *,
        continues: Callable[[], bool],
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
            # The engine's own message is not used with a renderer: one set of rules then reads tool
            # calls and thoughts, and the message follows from the recorded tokens.
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

    def _sampling_fields(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        if refused := sorted(RESERVED & overrides.keys()):
            raise BadRequest(f"{', '.join(refused)}: Headpond sets these fields; remove them from the chat call")
        return {name: value for name, value in {**self._sampling, **overrides}.items() if value is not None}

    def _seeded(self, sampling: Mapping[str, Any], arrival: int, *, continuation: int = 0) -> dict[str, Any]:
        """Derive the seed from the rollout and the number of the request, not from the attempt.
        A continuation must not draw the same numbers as its beginning."""
        text = f"{self._session.settings.rollout}/{arrival}{f'/{continuation}' if continuation else ''}"
        seed = xxhash.xxh3_64_intdigest(text.encode(), seed=self._seed & 0xFFFF_FFFF) & 0x7FFF_FFFF
        return {**sampling, **({"seed": seed} if self._settings.seeded else {})}


def count_use(usage: Usage, replica: Replica, previous: Replica | None, turn: Turn, seconds: float) -> None:
    """Count a response. If the conversation left another replica, its prompt was computed again."""
    usage.answered(replica.url, tokens=len(turn.completion_ids), seconds=seconds)
    if previous not in (None, replica):
        usage.lost(previous.url, turn.prefix_tokens)


@contextlib.contextmanager
def _classified_failures() -> Generator[None]:
    """Raise PolicyFailure or InfrastructureFailure in place of session errors."""
    try:
        yield
    except ContextFull as error:
        raise PolicyFailure(f"context limit: {error}") from error
    except Upstream as error:
        raise InfrastructureFailure(str(error)) from error


def _joined(first: Exchanged, last: Exchanged) -> Exchanged:
    """Join two parts of one completion. They count as one response if one replica reported the
    same version before each: its report after the last part then decides. Otherwise other
    weights may have sampled between the parts, and the versions become a range."""
    turn, parts = joined(first.value[0], last.value[0]), (first, last)
    stated = [part.value[0].version for part in parts if part.value[0].version is not None]
    reported = [part.version.version for part in parts]
    exact = all(part.version.exact for part in parts) and len({*reported, *stated}) == 1 and _same_server(first, last)
    return replace(
        last,
        value=(structs.replace(turn, version=last.value[0].version if exact else max(reported + stated)), None),
        version=SaidVersion(min(reported), exact=exact),
    )


def _same_server(first: Exchanged, last: Exchanged) -> bool:
    """Return whether one replica sent both and cannot have restarted in between: no request
    failed there since the first response."""
    since = first.answered_at
    return first.replica is last.replica and (since is None or first.replica.doubted_at < since)


def _with_message(turn: Turn) -> tuple[Turn, Message | None]:
    """Return the turn and its message. The fields that environments rely on are checked. Empty
    fields are removed: not every engine accepts them in the next request."""
    if turn.message is None:
        return turn, None
    decoded: Message = orjson.loads(turn.message)
    filled = {name: value for name, value in decoded.items() if value}
    content = None if decoded.get("tool_calls") else ""
    message: Message = {"role": "assistant", "content": content, **filled}
    for call in message.get("tool_calls") or []:
        function = call.get("function")
        if not isinstance(function, dict) or not all(
            isinstance(function.get(key), str) for key in ("name", "arguments")
        ):
            raise Upstream("the engine's message has a tool call without a name or without arguments in a string")
    return turn, message


async def prompt_of(
    renderer: PooledRenderer | None,
    prepared: Prepared,
    messages: Sequence[Message],
    *,
    tools: Tools,
    fields: Mapping[str, Any],
) -> Prompt:
    """Build the prompt of a request with these `fields`. A renderer adds token ids: recorded ids
    are reused, and only appended messages are tokenized. A renderer that cannot extend the
    previous turn tokenizes everything."""
    if renderer is None:
        return Prompt(messages=messages, tools=tools)
    values = fields.get(TEMPLATE_VALUES) or NO_VALUES
    if not isinstance(values, Mapping):
        raise BadRequest(f"{TEMPLATE_VALUES} must be an object")
    ids = await _prompt_ids(renderer, prepared, messages, tools, cast("TemplateValues", values))
    extends = begins_with(ids, prepared.history_ids)
    return Prompt(
        messages=messages,
        tools=tools,
        ids=ids,
        values=cast("TemplateValues", values),
        routes_from=prepared.routes_from if extends else 0,
        rewritten=not extends,
    )


async def _prompt_ids(
    renderer: PooledRenderer, prepared: Prepared, messages: Sequence[Message], tools: Tools, values: TemplateValues
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
    """Decode a completion without a message (token-in/token-out) with the renderer. `number` is
    the turn's in its session: it makes the ids of tool calls unique there. `fields` are those of
    the request."""
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
    """Cut the message at the first stop string. The token that completed it may hold more text
    behind it."""
    content, strings = message.get("content"), [stop] if isinstance(stop, str) else stop
    if not isinstance(content, str) or not isinstance(strings, list | tuple):
        return message
    positions = [
        content.find(string) for string in cast("Sequence[object]", strings) if isinstance(string, str) and string
    ]
    ends = [at for at in positions if at >= 0]
    return {**message, "content": content[: min(ends)]} if ends else message


async def named_adapter(
    dialect: Dialect, replicas: Replicas, model: str | None = None
) -> tuple[str | None, SaidVersion | None]:
    """Return the model to name in a request, and the version that the name guarantees; None if
    weights are not adapters. `model` is the caller's name: any but the policy's is passed on,
    and its version is exact if the run has loaded it. The model without an adapter answers a
    request that names none, even if the first adapter was loaded meanwhile."""
    policy, adapter_model = dialect.settings.model, dialect.control.adapter_model
    if model and model != policy:
        label = WeightLabel.parse(model.rpartition(":")[2])
        loaded = replicas.has_loaded(label) and adapter_model(policy, label.text) == model
        return model, SaidVersion(label.version if loaded else START_VERSION, exact=loaded) if replicas.lora else None
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
    """Build a turn's metadata. `sampling` holds the fields of the request, `request` its
    duration."""
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
