"""The APIs that agents speak. Each is one module that owns its requests, responses, streams and errors."""

from headpond.servers.sessions.apis.base import Api, ChatRequest, Completion, History, Recorded
from headpond.servers.sessions.apis.chat import ChatCompletions
from headpond.servers.sessions.apis.completions import Completions
from headpond.servers.sessions.apis.messages import Messages
from headpond.servers.sessions.apis.responses import Responses
from headpond.servers.sessions.headers import split_branch

CHAT = ChatCompletions()
MESSAGES = Messages()
APIS: tuple[Api, ...] = (CHAT, MESSAGES, Responses(), Completions())


def api_of(path: str) -> Api:
    """The API that a request's path belongs to, for the form of errors too; Chat Completions for any other path."""
    _, _, below = path.removeprefix("/sessions/").partition("/")
    below, _ = split_branch(f"/{below}")
    return next((api for api in APIS if below == api.path or below.startswith(f"{api.path}/")), CHAT)


__all__ = ["APIS", "CHAT", "MESSAGES", "Api", "ChatRequest", "Completion", "History", "Recorded", "api_of"]
