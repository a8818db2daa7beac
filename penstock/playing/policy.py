"""The policy of one rollout: every turn is asked of the engine and recorded in the rollout's session.

Owns the limits on turns and context. One chat at a time, as the session has it.
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
from penstock.engines.dialects import Dialect, Prompt
from penstock.engines.replicas import Replica
from penstock.engines.response import RequestInfo, read_turn
from penstock.engines.sampling import altered_sampling
from penstock.environments.protocol import Completion
from penstock.errors import BadRequest, ContextFull, InfrastructureFailure, NotFound, PolicyFailure, Upstream
from penstock.ids import engine_session
from penstock.recording import Prepared, Session
from penstock.renderers.protocol import NextTurn, Tools, begins_with
from penstock.turn import Message, Turn, TurnMetadata


class RecordedPolicy:
    def __init__(
        self,
        client: EngineClient,
        session: Session,
        settings: Policy,
        dialect: Dialect,
        *,
        seed: int = 0,
    ) -> None:
        self._client = client
        self._session = session
        self._settings = settings
        self._dialect = dialect
        self._seed = seed
        self._sampling = {**settings.sampling.model_dump(exclude={"more"}), **settings.sampling.more}
        self._home: Replica | None = None
        self.engine_s = 0.0
        """spent waiting for the engine"""
        self.failures = 0
        """of requests that were then sent again"""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        agent: str = "",
        train: bool = True,
        **sampling: Any,
    ) -> Completion:
        """One turn. `train=False` keeps what is said out of the loss; a sampling field of None takes a default away."""
        if self._session.turns >= self._settings.max_turns:
            raise PolicyFailure(f"turn limit: the rollout has had its {self._settings.max_turns} turns")
        messages, chosen = list(messages), self._chosen(sampling)
        with self._session.claim() as claim, _failures_of_two_kinds():
            prepared = self._session.prepare(claim, messages)
            prompt = await self._prompt(prepared, messages, tools)
            answer = await self._ask(prepared, prompt, chosen)
            turn, message = await self._spoken(prompt, *answer.value)
            metadata = _metadata(answer, chosen, agent=agent, train=train)
            recorded = await self._session.commit(claim, prepared, turn, metadata)
        if not recorded:
            raise NotFound(f"rollout {self._session.settings.rollout} has ended: nothing is recorded any more")
        if turn.overlong_prompt:
            raise PolicyFailure(f"context limit: the prompt has more than {self._settings.max_seq_len} tokens")
        return Completion(message=message, finish_reason=turn.finish_reason or "", truncated=turn.truncated)

    async def _prompt(self, prepared: Prepared, messages: Sequence[Message], tools: Tools) -> Prompt:
        renderer = self._dialect.renderer
        if renderer is None:
            return Prompt(messages=messages, tools=tools)
        history_ids, answer_from = prepared.history_ids, prepared.answer_from
        turn = NextTurn(
            messages=messages,
            tools=tools,
            prompt_ids=history_ids[:answer_from],
            completion_ids=history_ids[answer_from:],
            appended=len(prepared.request.appended),
        )
        ids = np.ascontiguousarray(await renderer.prompt_ids(turn), np.int32)
        routes_from = prepared.routes_from if begins_with(ids, history_ids) else 0
        return Prompt(messages=messages, tools=tools, ids=ids, routes_from=routes_from)

    async def _ask(
        self, prepared: Prepared, prompt: Prompt, sampling: Mapping[str, Any]
    ) -> Response[tuple[Turn, Message | None]]:
        seed = {"seed": self._turn_seed()} if self._settings.seeded else {}
        of = self._session.settings
        request = Request(
            path=self._dialect.endpoint,
            body=self._dialect.request_body(prompt, {**sampling, **seed}),
            headers={"X-Session-ID": engine_session(of.rollout, of.attempt)},
        )
        info = RequestInfo(
            endpoint=self._dialect.endpoint,
            prompt_ids=prompt.ids,
            routes_from=prompt.routes_from,
            max_seq_len=self._settings.max_seq_len,
        )
        read = functools.partial(
            read_turn, open_samples=prepared.open_samples, request=info, route_format=prepared.route_format
        )
        started = time.monotonic()
        try:
            answer = await self._client.send(request, lambda body: _with_message(read(body)), home=self._home)
        finally:
            self.engine_s += time.monotonic() - started
        self._home = answer.replica
        self.failures += answer.failures
        return answer

    async def _spoken(self, prompt: Prompt, turn: Turn, message: Message | None) -> tuple[Turn, Message]:
        """Where the engine only says tokens, the renderer knows what they mean."""
        if message is not None:
            return turn, message
        assert self._dialect.renderer is not None
        assert prompt.ids is not None
        said = await self._dialect.renderer.message(turn.completion_ids, prompt_ids=prompt.ids, tools=prompt.tools)
        message = {"role": "assistant", **said}
        return replace(turn, message=orjson.dumps(message)), message

    def _chosen(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        if refused := sorted(RESERVED & overrides.keys()):
            raise BadRequest(f"{', '.join(refused)}: not for an environment to set")
        chosen = {name: value for name, value in {**self._sampling, **overrides}.items() if value is not None}
        if self._dialect.renderer and "chat_template_kwargs" in chosen:
            raise BadRequest("the engine gets tokens, no template: set policy.renderer.chat_template_kwargs instead")
        return chosen

    def _turn_seed(self) -> int:
        """The same for the same rollout and turn, whichever attempt it is."""
        text = f"{self._session.settings.rollout}/{self._session.turns}"
        return xxhash.xxh3_64_intdigest(text.encode(), seed=self._seed & 0xFFFF_FFFF) & 0x7FFF_FFFF


@contextlib.contextmanager
def _failures_of_two_kinds() -> Generator[None]:
    try:
        yield
    except ContextFull as error:
        raise PolicyFailure(f"context limit: {error}") from error
    except Upstream as error:
        raise InfrastructureFailure(str(error)) from error


def _with_message(turn: Turn) -> tuple[Turn, Message | None]:
    """The turn and what was said, checked as far as an environment relies on it; without the fields that say nothing,
    which not every engine takes back."""
    if turn.message is None:
        return turn, None
    said: Message = orjson.loads(turn.message)
    message: Message = {"role": "assistant", "content": None, **{name: value for name, value in said.items() if value}}
    for call in message.get("tool_calls") or []:
        function = call.get("function")
        if not isinstance(function, dict) or not all(isinstance(function.get(of), str) for of in ("name", "arguments")):
            raise Upstream("the engine's message has a tool call without a name or without arguments in a string")
    return turn, message


def _metadata(
    answer: Response[tuple[Turn, Message | None]], sampling: Mapping[str, Any], *, agent: str, train: bool
) -> TurnMetadata:
    turn = answer.value[0]
    return TurnMetadata(
        agent=agent,
        engine=answer.replica.url,
        version_sent=answer.version_sent,
        version_received=answer.version_received,
        temperature=float(sampling.get("temperature", 1.0)),
        sampling=altered_sampling(sampling),
        completion_mask=None if train else np.zeros(len(turn.completion_ids), np.uint8),
    )
