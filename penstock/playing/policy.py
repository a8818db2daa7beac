"""The policy of one rollout: each chat is sent to the engine and recorded in the rollout's session.

Enforces the limits on turns and context. One chat at a time.
"""

import contextlib
import functools
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import xxhash

from penstock.config.engine import RESERVED, Policy
from penstock.engines.client import EngineClient, Request, Response
from penstock.engines.continuation import (
    MAX_CONTINUATIONS,
    can_continue,
    continued_prompt,
    joined,
    open_sample_of,
    remaining,
)
from penstock.engines.dialects import Dialect, Prompt
from penstock.engines.replicas import Replica
from penstock.engines.response import KEEP, RequestInfo, read_turn
from penstock.engines.transport import SESSION_HEADER
from penstock.environments.protocol import Completion
from penstock.errors import BadRequest, ContextFull, InfrastructureFailure, NotFound, PolicyFailure, Upstream
from penstock.fields import TrainerField
from penstock.ids import engine_session
from penstock.playing.turns import named_adapter, prompt_ids, rendered_message, turn_metadata
from penstock.recording import Prepared, Session
from penstock.renderers.protocol import Tools, begins_with
from penstock.turn import Ids, Message, OpenSample, RouteFormat, SaidVersion, Turn, TurnMetadata

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
        if self._session.turns >= self._settings.max_turns:
            raise PolicyFailure(
                f"turn limit: the rollout has used its {self._settings.max_turns} turns (policy.max_turns)"
            )
        messages, fields = list(messages), self._sampling_fields(sampling)
        with self._session.claim() as claim, _classified_failures():
            prepared = self._session.prepare(claim, messages)
            prompt = await self._prompt(prepared, messages, tools)
            response = await self._send(prepared, prompt, fields)
            turn, message = await self._with_rendered_message(prompt, *response.value)
            metadata = _metadata(response, fields, agent=agent, train=train)
            recorded = await self._session.commit(claim, prepared, turn, metadata)
        if not recorded:
            raise NotFound(f"rollout {self._session.settings.rollout} has ended: its session records no more turns")
        if turn.overlong_prompt:
            raise PolicyFailure(
                f"context limit: the prompt has more than {self._settings.max_seq_len} tokens (policy.max_seq_len)"
            )
        return Completion(
            message=message,
            finish_reason=turn.finish_reason or "",
            truncated=turn.truncated,
            token_ids=turn.completion_ids,
            fields=self.turn_fields.setdefault(prepared.turns, {}),
        )

    def sample_ids(self) -> list[Ids]:
        """The tokens of each sample so far: the layout of `Score.columns`."""
        return self._session.sample_ids()

    async def _prompt(self, prepared: Prepared, messages: Sequence[Message], tools: Tools) -> Prompt:
        renderer = self._dialect.renderer
        if renderer is None:
            return Prompt(messages=messages, tools=tools)
        ids = await prompt_ids(renderer, prepared, messages, tools)
        routes_from = prepared.routes_from if begins_with(ids, prepared.history_ids) else 0
        return Prompt(messages=messages, tools=tools, ids=ids, routes_from=routes_from)

    async def _send(self, prepared: Prepared, prompt: Prompt, sampling: Mapping[str, Any]) -> Exchanged:
        """The engine's answer. An aborted one is continued if possible: the parts become one turn."""
        continues = can_continue(prompt, sampling)
        open_samples, route_format = prepared.open_samples, prepared.route_format
        response = await self._exchange(prompt, self._seeded(sampling), open_samples, route_format, continues=continues)
        continuations = 0
        while (turn := response.value[0]).aborted:
            self.aborts += 1
            rest_sampling = remaining(sampling, len(turn.completion_ids))
            if turn.truncated or rest_sampling is None:  # it has all the tokens that it may have
                whole = replace(turn, aborted=False, finish_reason="length", message=None)
                return replace(response, value=(whole, None))
            continuations += 1
            if continuations > MAX_CONTINUATIONS:
                raise InfrastructureFailure(f"the engine aborted one completion {continuations} times: {KEEP}")
            sample = open_sample_of(turn, open_samples)
            rest = await self._exchange(
                continued_prompt(prompt, turn, sample),
                self._seeded(rest_sampling, continuation=continuations),
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
            continues=continues,
        )
        read = functools.partial(read_turn, open_samples=open_samples, request=info, route_format=route_format)
        started = time.monotonic()
        try:
            response = await self._client.send(
                request, lambda body: _with_message(read(body)), preferred=self._last_replica
            )
        finally:
            self.engine_s += time.monotonic() - started
        self._last_replica = response.replica
        self.failures += response.failures
        self.aborts += response.aborts
        return response

    async def _with_rendered_message(self, prompt: Prompt, turn: Turn, message: Message | None) -> tuple[Turn, Message]:
        if message is not None:
            return turn, message
        message = await rendered_message(self._dialect, prompt, turn)
        return replace(turn, message=orjson.dumps(message)), message

    def _sampling_fields(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        if refused := sorted(RESERVED & overrides.keys()):
            raise BadRequest(f"{', '.join(refused)}: Penstock sets these fields; remove them from the chat call")
        fields = {name: value for name, value in {**self._sampling, **overrides}.items() if value is not None}
        if self._dialect.renderer and "chat_template_kwargs" in fields:
            raise BadRequest(
                "chat_template_kwargs: the prompt is sent as tokens; set policy.renderer.chat_template_kwargs instead"
            )
        return fields

    def _seeded(self, sampling: Mapping[str, Any], *, continuation: int = 0) -> dict[str, Any]:
        return {**sampling, "seed": self._turn_seed(continuation)} if self._settings.seeded else dict(sampling)

    def _turn_seed(self, continuation: int) -> int:
        """Depends on rollout and turn, not on the attempt. A continuation must not draw what its beginning drew."""
        text = f"{self._session.settings.rollout}/{self._session.turns}{f'/{continuation}' if continuation else ''}"
        return xxhash.xxh3_64_intdigest(text.encode(), seed=self._seed & 0xFFFF_FFFF) & 0x7FFF_FFFF


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
    """Where the answers do not state the versions of their tokens, those of the parts are a range."""
    turn, parts = joined(first.value[0], rest.value[0]), (first, rest)
    stated = [part.value[0].version for part in parts if part.value[0].version is not None]
    before = [part.version.version for part in parts]
    return replace(
        rest,
        value=(replace(turn, version=max(before + stated)), None),
        version=SaidVersion(min(before), exact=False),
    )


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


def _metadata(response: Exchanged, sampling: Mapping[str, Any], *, agent: str, train: bool) -> TurnMetadata:
    turn, _ = response.value
    return turn_metadata(
        sampling,
        response.replica,
        version=response.version,
        answered_at=response.answered_at,
        agent=agent,
        completion_mask=None if train else np.zeros(len(turn.completion_ids), np.uint8),
    )
