"""A connection whose failures are told as JSON: what is no HTTP, heads that are too large, our own mistakes."""

import logging
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

logger = logging.getLogger("penstock.sessions")

JSON = "application/json"


class JsonErrors(web.RequestHandler):
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
            status, message = 431, "the request's head is too large"
        elif not isinstance(exc, HttpProcessingError):
            logger.error("action=unexpected path=%s", request.path, exc_info=exc)
            message = "an error of the session server: its log says which"
        if request.writer.output_size:
            raise ConnectionError("an answer has begun: the connection cannot tell of the error")
        response = error_response(status, message or "bad request")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Of the connection itself, as when a body cannot be decoded: its client's doing, and worth one line."""
        logger.warning("action=connection_dropped error=%r", kw.get("exc_info"))


class JsonServer(web.Server):
    def __init__(self, handler: Any, **options: Any) -> None:
        super().__init__(handler, **options)
        self._options = options

    def __call__(self) -> web.RequestHandler:
        return JsonErrors(self, loop=self._loop, **self._options)


def error_response(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=orjson.dumps({"error": text}), content_type=JSON)
