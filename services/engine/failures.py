"""What goes wrong on purpose: which failure a request meets, and what a body looks like that is no answer."""

from collections.abc import Sequence
from dataclasses import fields
from enum import StrEnum

from services.engine.draws import Draws
from services.engine.settings import FailureRates

PAGE = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


class Failure(StrEnum):
    """By the names of the rates."""

    ERROR = "error"
    MALFORMED = "malformed"
    HANG = "hang"
    DISCONNECT = "disconnect"


def failure_of(draws: Draws, rates: FailureRates) -> Failure | None:
    share = draws.uniform("failure")
    for rate in fields(rates):
        share -= getattr(rates, rate.name)
        if share < 0:
            return Failure(rate.name)
    return None


def malformed(parts: Sequence[bytes | memoryview], draws: Draws) -> bytes:
    """Cut short, another program's page, or a count that does not fit: JSON as good as any, and yet a lie."""
    body = b"".join(parts)
    match draws.integer("malformed", 1, 3):
        case 1:
            return body[: len(body) // 2]
        case 2:
            return PAGE
        case _:
            one_more = body.replace(b'"token_ids":[', b'"token_ids":[0,', 1)
            return one_more.replace(b'"completion_tokens":', b'"completion_tokens":1')
