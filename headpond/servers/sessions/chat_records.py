"""The record of a chat, kept with its turn, and what is found in it later: the answer for a request that is sent again,
and the conversation that a request names by the id of an answer."""

import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from headpond.errors import BadRequest
from headpond.recording import Session
from headpond.recording.conversation import NO_ARRIVAL
from headpond.servers.sessions.apis import CHAT, Api, History
from headpond.servers.sessions.requests import Chat

ARRIVAL = re.compile("[0-9a-f]{8}")


class _Record(msgspec.Struct):
    response: msgspec.Raw
    instructions: int = 0


RECORD = msgspec.json.Decoder(_Record)


def record_of(path: str, chat: Chat, sent: bytes, response: bytes) -> bytes:
    """Both are valid JSON, so nothing is parsed. The response is a chat completion, whatever the API."""
    of_api = b"" if chat.api is CHAT else b',"api":"%b"' % chat.api.path.encode()
    if chat.instructions:
        of_api += b',"instructions":%d' % chat.instructions
    return b'{"timestamp":%.6f,"method":"POST","path":"%b","status_code":200,"request":%b,"response":%b%b}' % (
        time.time(),
        path.encode(),
        sent,
        response,
        of_api,
    )


def answer_id_of(session: Session, arrival: int) -> str:
    """Return the id with which a later request of the same session finds the answer. A chat that is left out gets a
    random one."""
    number = f"{arrival:08x}" if arrival != NO_ARRIVAL else f"x{secrets.token_hex(4)}"
    return session.settings.session + number


async def history_of(session: Session, api: Api, given: Mapping[str, Any]) -> History | None:
    if (id := api.continues(given)) is None:
        return None
    number = str(id).partition("_")[2].removeprefix(session.settings.session)
    turn = session.turn_of(int(number, 16)) if ARRIVAL.fullmatch(number) else None
    if turn is None:
        raise BadRequest(f"Previous response with id {id!r} not found: a session has only its own recorded responses")
    instructions = RECORD.decode(await session.record_of(turn)).instructions
    return History(messages=await session.messages_until(turn), instructions=instructions)


async def recorded_completion(session: Session, turn: int) -> bytes:
    return bytes(RECORD.decode(await session.record_of(turn)).response)
