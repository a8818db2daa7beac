"""Errors of the session server in OpenAI's form, by which the clients' libraries decide whether to send again."""

import re

import orjson
from aiohttp import web

from penstock.errors import ContextFull, SessionError

JSON = "application/json"
CONTEXT_LENGTH = "This model's maximum context length is reached"
"""Begins the error of every limit that ends a conversation. Agents' libraries look for these words: they then stop
instead of sending the request again for minutes."""
MAY_SUCCEED_LATER = frozenset({408, 409, 429})
"""Client errors that a later request may not meet. A server error may always pass."""
NO_RETRY = {"x-should-retry": "false"}
"""Read by the packages `openai` and `anthropic`."""
TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}


def error_response(status: int, text: str, *, code: str = "") -> web.Response:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    readable = text.encode("utf-8", "replace").decode()  # it may repeat what the client sent
    body = orjson.dumps({"error": {"message": readable, "type": kind, "code": code or kind}})
    final = status < 500 and status not in MAY_SUCCEED_LATER
    return web.Response(status=status, body=body, content_type=JSON, headers=NO_RETRY if final else None)


def response_to(error: SessionError) -> web.Response:
    if isinstance(error, ContextFull):
        return error_response(error.status_code, f"{CONTEXT_LENGTH}: {error}", code="context_length_exceeded")
    return error_response(error.status_code, str(error), code=_code(error))


def _code(error: SessionError) -> str:
    """`NothingToTrain` -> `nothing_to_train`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
