"""Agents' queries about the model: the tokens of a prompt, and one model by its name. Neither is recorded."""

from collections.abc import Mapping
from typing import Any, cast

import orjson
from aiohttp import web

from headpond.config import RunConfig
from headpond.errors import NotFound, Upstream
from headpond.playing.policy import prompt_of
from headpond.recording import Session
from headpond.renderers import PooledRenderer
from headpond.servers.sessions.apis import MESSAGES
from headpond.servers.sessions.backend import Backend, EngineRequest
from headpond.servers.sessions.error_responses import JSON
from headpond.servers.sessions.requests import ChatRules, by_size, read_chat, read_object

MODELS = "/v1/models"
TOKENIZE = "/tokenize"
# Estimate from English prose, for an engine without /tokenize.
BYTES_PER_TOKEN = 4


class EngineQueries:
    def __init__(self, config: RunConfig, backend: Backend, renderer: PooledRenderer | None) -> None:
        self._config = config
        self._backend = backend
        self._renderer = renderer

    async def count_tokens(self, request: web.BaseRequest, session: Session, body: bytes, rules: ChatRules) -> int:
        """The tokens of a prompt: by the renderer, by the engine, or else by the length of its text."""
        size = len(body)
        given = await by_size(size, read_object, body)
        chat = await by_size(size, read_chat, MESSAGES, given, headers=request.headers, rules=rules)
        tools = chat.fields.get("tools")
        if self._renderer:
            prepared = session.unrecorded(chat.conversation)
            messages = chat.conversation.messages
            prompt = await prompt_of(self._renderer, prepared, messages, tools=tools, fields=chat.fields)
            assert prompt.ids is not None
            return len(prompt.ids)
        model = chat.fields.get("model") or self._config.engine.model
        wanted = {"model": model, "messages": chat.conversation.messages}
        body = await by_size(size, orjson.dumps, wanted | ({"tools": tools} if tools else {}))
        answer = await self._ask("POST", TOKENIZE, body)
        match answer:
            case {"count": int(count)}:
                return count
            case _:
                return -(-len(body) // BYTES_PER_TOKEN)

    async def model(self, name: str, rules: ChatRules) -> bytes:
        """The engine's entry of a model. If the session decides which one is used, every name is that one's."""
        wanted = rules.forced.get("model") or name
        answer = await self._ask("GET", MODELS)
        entries = answer.get("data") if answer else None
        for entry in cast("list[object]", entries) if isinstance(entries, list) else []:
            match entry:
                case {"id": id} if id == wanted:
                    return orjson.dumps({**cast("dict[str, Any]", entry), "id": name})
                case _:
                    pass
        raise NotFound(f"the engine has no model {wanted!r}")

    async def _ask(self, method: str, path: str, body: bytes = b"") -> Mapping[str, Any] | None:
        """Return the engine's JSON object; None if it has no such path, or sends something else."""
        request = EngineRequest(method=method, target=path, body=body, headers={"Content-Type": JSON})
        async with self._backend.send(request) as response:
            if response.status >= 500:
                raise Upstream(f"the engine answered {path} with status {response.status}")
            if response.status != 200:
                return None
            try:
                answer = orjson.loads(response.joined())
            except orjson.JSONDecodeError:
                return None
            return cast("Mapping[str, Any]", answer) if isinstance(answer, dict) else None
