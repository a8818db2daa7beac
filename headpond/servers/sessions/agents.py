"""Which of a session's agents sends a request: its URL names a branch, or its own headers identify it."""

import re

from aiohttp import web

from headpond.recording.sample_tree import ID_MARK

BRANCH = re.compile(r"/branch/(?P<name>[A-Za-z0-9._~-]{1,64})(?=/)")
"""Behind the path of a session: `/sessions/ID/branch/NAME/v1/chat/completions`."""
ID_HEADERS = ("x-claude-code-agent-id", "thread-id")
"""Ids that agents send by themselves. They are random, so samples name such agents by their order of arrival."""
ID_CHARACTERS = 64


def split_branch(path: str) -> tuple[str, str]:
    """The path below a session without its branch, and the branch's name."""
    match = BRANCH.match(path)
    return (path[match.end() :], match["name"]) if match else (path, "")


def agent_of(request: web.BaseRequest) -> str:
    """The agent's name; empty for the main one."""
    _, _, below = request.rel_url.raw_path.removeprefix("/sessions/").partition("/")
    if branch := split_branch(f"/{below}")[1]:
        return branch
    for header in ID_HEADERS:
        if id := request.headers.get(header, "").strip():
            return ID_MARK + "".join(filter(str.isprintable, id))[:ID_CHARACTERS]
    return ""
