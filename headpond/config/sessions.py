"""The section `[sessions]`: address, authentication and limits of `headpond sessions`."""

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, SecretStr, field_validator, model_validator

from headpond.config.engine import RESERVED
from headpond.declarations.sections import OF_HOST, CommaSeparated, Port, Reader, Section, read_by

ADMINISTRATIVE = re.compile(
    "weight|cache|sleep|wake|flush|lora|profile|abort|pause|resume|continue|memory|shutdown|reset|update|load|admin"
)
"""Parts of paths that change the engine for every client: agents are not allowed to request them."""
PLAIN_PATH = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+")


class LeaveOut(Section):
    """Which requests are not the task, such as titles and summaries. All patterns that are given must match."""

    system: str | None = None
    """Regular expression, searched in the text of the system messages."""
    user: str | None = None
    """Regular expression, searched in the text of the last user message."""
    model: str | None = None
    """Regular expression, searched in the name of the model that the client asks for."""

    @model_validator(mode="after")
    def _check_patterns(self) -> "LeaveOut":
        patterns = {name: value for name, value in self.model_dump().items() if value is not None}
        if not patterns:
            raise ValueError("give at least one of system, user and model: the rule would leave out every request")
        for name, pattern in patterns.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{name} is not a regular expression: {error}") from None
        return self


class Sessions(Section):
    """The session server, which records agents that use OpenAI's or Anthropic's API."""

    declared = read_by(Reader.SESSIONS)

    urls: Annotated[CommaSeparated, read_by(Reader.ROLLOUTS), OF_HOST] = ()
    """URLs of the session servers, `http://host:port`, for rollout workers whose environments run their own agents."""
    host: Annotated[str, OF_HOST] = "127.0.0.1"
    """Bind address. Any address other than loopback requires secrets, unless `require_secret` is set."""
    port: Annotated[Port, OF_HOST] = 8100
    """Port to listen on; 0 picks a free one and logs it. A server restarted on the same port resumes its sessions."""
    processes: Annotated[PositiveInt, OF_HOST] = 1
    """Session servers that `headpond sessions` starts, on as many ports from `port` on. One that dies is started again,
    with its sessions. `urls` has all of them."""
    instance_id: Annotated[Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None, OF_HOST] = None
    """Identity of this server, 32 hex digits, shown by /health. A server restarted with it on another host or port
    resumes its sessions. Default: random, and sessions are found by host name and port."""
    require_secret: bool | None = None
    """Whether every request must carry its session's secret as bearer token. Default: unless `host` is loopback."""
    create_key: Annotated[SecretStr | None, OF_HOST, read_by(Reader.SESSIONS, Reader.ROLLOUTS)] = None
    """Bearer token that creating a session needs. Set HEADPOND_SESSIONS__CREATE_KEY for session servers and workers
    rather than writing it to a file. Default: any client may create sessions, agents included, and say which versions
    of the weights may serve."""
    mode: Literal["linear", "open"] | None = None
    """Whether a request must extend the conversation (`linear`) or may diverge from it (`open`). Default: `linear` with
    `policy.renderer`, else `open`."""
    echo: Annotated[Literal["recognised", "exact"], read_by(Reader.SESSIONS, Reader.ROLLOUTS)] = "recognised"
    """When an assistant message that an agent returns is the recorded answer: with its text up to white space and its
    tool calls (`recognised`; the recorded message then takes its place), or only unchanged (`exact`)."""
    concurrency: Annotated[PositiveInt, read_by(Reader.SESSIONS, Reader.ROLLOUTS)] = 1
    """Most chats of one session in flight, for agents that run several at once."""
    when_busy: Annotated[Literal["refuse", "queue"], read_by(Reader.SESSIONS, Reader.ROLLOUTS)] = "refuse"
    """What happens to a chat beyond `concurrency`: it is refused with 409, or waits for its turn."""
    model: str | None = None
    """Model of every chat, whatever the client names. A session may be created with another one. Default: the client's,
    or `engine.model` if it names none."""
    forced: dict[str, Any] = Field(default={})
    """Fields of every chat, whatever the client sends, e.g. `{temperature = 1.0, max_tokens = 4096}`. A session may be
    created with others, which come first."""
    leave_out: dict[str, LeaveOut] = Field(default={})
    """Rules for chats that are answered and logged, and not trained on, each under a name of its own."""
    keep_alive_s: PositiveFloat = 10.0
    """Seconds without a byte after which a stream sends a keep-alive."""
    append_roles: CommaSeparated = ("tool", "user")
    """Roles of the messages that may extend a linear conversation."""
    proxy_allow: CommaSeparated = ()
    """Further paths of the engine that agents may request, e.g. `/v1/embeddings`."""
    cpu_workers: Annotated[PositiveInt | None, OF_HOST] = None
    """Threads that parse large bodies. Default: one per core."""
    max_sessions: PositiveInt = 10_000
    """Most open sessions; further ones are refused with 503."""
    idle_s: PositiveFloat = 3600.0
    """Seconds without a request after which a session expires."""
    lifetime_s: PositiveFloat = 86_400.0
    """Seconds after which a session expires, idle or not."""
    session_bytes: PositiveInt = 16 << 30
    """Bytes of one session's files above which it expires."""
    request_bytes: PositiveInt = 16 << 20
    """Most bytes of one request. A context of a million tokens takes about 4 MB."""
    requests_bytes: PositiveInt = 1 << 30
    """Most bytes of all requests in progress; above it, reads wait."""
    header_bytes: PositiveInt = 16 << 10
    """Most bytes of one header line."""
    request_s: PositiveFloat = 60.0
    """Seconds for a request's head to arrive, and again for its body; also how long an idle connection is kept."""
    connections: PositiveInt = 16_384
    """Most open connections of clients. Beyond it, the one that has been idle longest is closed for a new one."""
    address_connections: PositiveInt = 8192
    """Most open connections of one address by the same rule."""
    engine_wait_s: NonNegativeFloat = 30.0
    """Seconds that an agent's request waits while no replica takes it: while weights are loaded (replicas are refused
    or answer 503), or the engine restarts. After that, the agent gets the reason with 502, or the engine's 503."""
    drain_s: PositiveFloat = 30.0
    """Seconds that a stopping server waits for requests in progress."""

    @property
    def needs_secret(self) -> bool:
        return not is_loopback(self.host) if self.require_secret is None else self.require_secret

    @field_validator("forced")
    @classmethod
    def _check_forced(cls, forced: dict[str, Any]) -> dict[str, Any]:
        if refused := sorted(RESERVED & forced.keys()):
            raise ValueError(f"{', '.join(refused)}: set by Headpond itself, or by sessions.model")
        return forced

    @field_validator("proxy_allow")
    @classmethod
    def _check_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not PLAIN_PATH.fullmatch(path):
                raise ValueError(f"{path!r} is not a plain path such as /v1/embeddings")
            if ADMINISTRATIVE.search(path.lower()):
                raise ValueError(f"{path} administers the engine and cannot be opened to agents")
        return paths


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
