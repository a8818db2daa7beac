"""The APIs that agents speak. Each is one module that owns its requests, responses, streams and errors."""

from services.sessions.agents import split_branch
from services.sessions.apis.base import Api, ChatRequest, Completion, History, Recorded
from services.sessions.apis.chat import ChatCompletions
from services.sessions.apis.completions import Completions
from services.sessions.apis.messages import Messages
from services.sessions.apis.responses import Responses

CHAT = ChatCompletions()
MESSAGES = Messages()
APIS: tuple[Api, ...] = (CHAT, MESSAGES, Responses(), Completions())


def api_of(path: str) -> Api:
    """The API that a request's path belongs to, for the form of errors too; Chat Completions for any other path."""
    _, _, below = path.removeprefix("/sessions/").partition("/")
    below, _ = split_branch(f"/{below}")
    return next((api for api in APIS if below == api.path or below.startswith(f"{api.path}/")), CHAT)


__all__ = ["APIS", "CHAT", "MESSAGES", "Api", "ChatRequest", "Completion", "History", "Recorded", "api_of"]
