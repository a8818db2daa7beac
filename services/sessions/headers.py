"""Which headers pass between client and engine, and the check of a session's secret.

Hop-by-hop headers are stripped in both directions; a session's secret never reaches the engine.
"""

import hashlib
import hmac
from collections.abc import Mapping

from multidict import CIMultiDict

HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade", "content-length", "content-encoding"}
)
# Responses are parsed, so no compression is requested; `expect` is handled before the body is read.
NOT_FOR_UPSTREAM = HOP_BY_HOP | {"host", "accept-encoding", "expect"}
NOT_FOR_CLIENT = HOP_BY_HOP | {"server", "date"}
AUTHORIZATION = "Authorization"


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def has_secret(headers: Mapping[str, str], secret_digest: str) -> bool:
    scheme, _, token = headers.get(AUTHORIZATION, "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(digest(token.strip()), secret_digest)


def to_upstream(headers: Mapping[str, str], secret_digest: str, *, own_key: bool) -> CIMultiDict[str]:
    """`own_key`: engine.api_key is set, which replaces the client's authorization."""
    passed = _without(headers, NOT_FOR_UPSTREAM)
    if own_key or has_secret(headers, secret_digest):
        passed.popall(AUTHORIZATION, None)
    return passed


def to_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return _without(headers, NOT_FOR_CLIENT)


def _without(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    """Drops also the headers that `Connection` names."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    kept = ((name, value) for name, value in headers.items() if name.lower() not in dropped | named)
    return CIMultiDict(kept)
