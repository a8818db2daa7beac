"""The section `[sessions]`: what `penstock sessions` listens to, whom it trusts, and what it lets a session use."""

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from penstock.config.sections import Section, Words

ADMINISTRATIVE = re.compile(
    "weight|cache|sleep|wake|flush|lora|profile|abort|pause|resume|continue|memory|shutdown|reset|update|load|admin"
)
"""In the path of what changes an engine for everybody: an agent is not trusted with that."""
PLAIN_PATH = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+")


class Sessions(Section):
    urls: Words = ()
    """where rollout workers find session servers, for environments with agents of their own: http://host:port"""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8100
    """0: any free one; the log says which. Started again on its port, a server goes on with its sessions"""
    instance_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    """what /health calls this server, and what its sessions are found by after a restart on another host or port;
    default: random, and found by host name and port"""
    require_secret: bool | None = None
    """every session's secret as bearer token; default: as soon as the host is not this machine's own"""
    mode: Literal["linear", "open"] | None = None
    """Whether a request must extend the conversation (`linear`) or may diverge from it (`open`). Default: `linear` with
    `policy.renderer`, else `open`."""
    append_roles: Words = ("tool", "user")
    """who may speak in what a linear conversation is continued with"""
    proxy_allow: Words = ()
    """further paths of the engine that an agent may use, as they are (`/v1/embeddings`)"""
    cpu_workers: PositiveInt | None = None
    """threads that read large bodies; default: one a core"""
    max_sessions: PositiveInt = 10_000
    """open at once; more are refused"""
    idle_s: PositiveFloat = 3600.0
    """a session that nobody talked to for this long has been abandoned"""
    lifetime_s: PositiveFloat = 86_400.0
    """of a session, however busy"""
    session_bytes: PositiveInt = 16 << 30
    """of one session's files; a larger one expires"""
    request_bytes: PositiveInt = 16 << 20
    """of one request; a context of a million tokens has some 4 MB"""
    requests_bytes: PositiveInt = 1 << 30
    """of all requests that are not yet answered; over it, reads wait"""
    header_bytes: PositiveInt = 16 << 10
    """of one line of a request's head"""
    request_s: PositiveFloat = 60.0
    """for a request's body to arrive"""
    drain_s: PositiveFloat = 30.0
    """for what is being answered when the server is told to stop"""

    @property
    def needs_secret(self) -> bool:
        return not is_loopback(self.host) if self.require_secret is None else self.require_secret

    @field_validator("proxy_allow")
    @classmethod
    def _harmless(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not PLAIN_PATH.fullmatch(path):
                raise ValueError(f"{path!r} is no plain path: write /v1/embeddings")
            if ADMINISTRATIVE.search(path.lower()):
                raise ValueError(f"{path} administers the engine: an agent is never let through to it")
        return paths


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
