"""Errors of the session server in the form of each API: by them the clients' libraries decide whether to send again."""

import re

import orjson
from aiohttp import web

from headpond.errors import ContextFull, SessionError
from headpond.servers.sessions.apis import CHAT, Api
from headpond.turn import Body

JSON = "application/json"
# Every error of a limit that ends a conversation begins with this. Agents' libraries look for these words. They then
# stop, instead of sending the request again for minutes.
CONTEXT_LENGTH = "This model's maximum context length is reached"
CONTEXT_CODE = "context_length_exceeded"
# Client errors that a later request may not meet. A server error may always pass.
MAY_SUCCEED_LATER = frozenset({408, 409, 429})
# The packages `openai` and `anthropic` read this header.
NO_RETRY = {"x-should-retry": "false"}


def error_response(status: int, text: str, *, code: str = "", api: Api = CHAT) -> web.Response:
    readable = text.encode("utf-8", "replace").decode()  # it may repeat what the client sent
    body = orjson.dumps(api.error(status, readable, code))
    final = status < 500 and status not in MAY_SUCCEED_LATER
    return web.Response(status=status, body=body, content_type=JSON, headers=NO_RETRY if final else None)


def response_to(error: SessionError, api: Api = CHAT) -> web.Response:
    if isinstance(error, ContextFull):
        return error_response(error.status_code, f"{CONTEXT_LENGTH}: {error}", code=CONTEXT_CODE, api=api)
    return error_response(error.status_code, str(error), code=_code(error), api=api)


def engine_error(body: Body) -> str:
    """The text of an engine's error, in whichever of the usual forms."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")
    match parsed:
        case {"error": {"message": str(text)}} | {"error": str(text)} | {"message": str(text)}:
            return text
        case _:
            return body.decode("utf-8", "replace")


def _code(error: SessionError) -> str:
    """`NothingToTrain` -> `nothing_to_train`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
