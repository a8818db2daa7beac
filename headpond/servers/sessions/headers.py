"""Which headers pass between client and engine, the check of a session's secret, and the agent that a request names.

Hop-by-hop headers are stripped in both directions; a session's secret never reaches the engine.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Mapping

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from headpond.recording.sample_tree import ID_MARK

HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade", "content-length", "content-encoding"}
)
# Responses are parsed, so no compression is requested; `expect` is handled before the body is read.
NOT_FOR_UPSTREAM = HOP_BY_HOP | {"host", "accept-encoding", "expect"}
NOT_FOR_CLIENT = HOP_BY_HOP | {"server", "date"}
AUTHORIZATION = "Authorization"
API_KEY = "x-api-key"
KEYS = frozenset({"authorization", "x-api-key", "api-key"})
SECRET_BYTES = 32
# Matches what `new_secret` returns: 32 bytes in URL-safe base64.
SECRET = re.compile(r"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")
# The part behind a session's path: `/sessions/ID/branch/NAME/v1/chat/completions`.
BRANCH = re.compile(r"/branch/(?P<name>[A-Za-z0-9._~-]{1,64})(?=/)")
# Ids that agents send by themselves. They are random, so samples name such agents by their order of arrival.
ID_HEADERS = ("x-claude-code-agent-id", "thread-id")
ID_CHARACTERS = 64


def new_secret() -> str:
    return secrets.token_urlsafe(SECRET_BYTES)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def has_secret(headers: CIMultiDictProxy[str], secret_digest: str) -> bool:
    """Whether an Authorization is the secret as bearer token, or an x-api-key is the secret. A client may send
    several."""
    given = (value.split(maxsplit=1) for value in headers.getall(AUTHORIZATION, ()))
    tokens = [parts[1].strip() for parts in given if len(parts) == 2 and parts[0].lower() == "bearer"]
    tokens += (value.strip() for value in headers.getall(API_KEY, ()))
    return any(hmac.compare_digest(digest(token), secret_digest) for token in tokens)


def to_upstream(headers: CIMultiDictProxy[str], secret_digests: Collection[str], *, own_key: bool) -> CIMultiDict[str]:
    """`own_key`: engine.api_key is set, which replaces the client's keys. No header that holds a secret of the session
    is passed, whatever its name."""
    passed = _without(headers, NOT_FOR_UPSTREAM)
    for name, value in headers.items():
        if (own_key and name.lower() in KEYS) or names_secret(value, secret_digests):
            passed.popall(name, None)
    return passed


def names_secret(text: str, secret_digests: Collection[str]) -> bool:
    return any(digest(word) in secret_digests for word in SECRET.findall(text))


def to_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return _without(headers, NOT_FOR_CLIENT)


def _without(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    """Drops also the headers that `Connection` names."""
    if named := headers.get("Connection"):
        dropped |= {name.strip().lower() for name in named.split(",")}
    return CIMultiDict([(name, value) for name, value in headers.items() if name.lower() not in dropped])


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
