"""`headpond sessions`: the session server, which gives each agent its own OpenAI-compatible URL."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option

from headpond.commands.output import CONFIG_HELP, LOG_FORMAT

Mode = Literal["linear", "open"]


def sessions(
    config: Annotated[Path | None, Argument(metavar="CONFIG.toml", help=CONFIG_HELP, show_default=False)] = None,
    host: Annotated[str | None, Option(help="Bind address. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, Option(help="Default: 8100. 0: any free port.")] = None,
    processes: Annotated[int | None, Option(help="Servers, on as many ports from --port on. Default: 1.")] = None,
    engine_urls: Annotated[str | None, Option(help="URLs of the engine's replicas, separated by commas.")] = None,
    policy_renderer: Annotated[
        str | None, Option(help="Render prompts here: a tokenizer's directory, or bytes-chatml.")
    ] = None,
    mode: Annotated[Mode | None, Option(help="Default: linear with a renderer, otherwise open.")] = None,
    instance_id: Annotated[str | None, Option(help="32 hex digits. Default: random.")] = None,
    engine_routed_experts: Annotated[
        bool | None, Option("--engine-routed-experts", help="Request routed experts.")
    ] = None,
    proxy_allow: Annotated[str | None, Option(help="Further paths that agents may request: /v1/embeddings,...")] = None,
    store: Annotated[
        str | None, Option(help="URL of the store: file:///... or module:Class://address. Default: the run's.")
    ] = None,
    require_secret: Annotated[
        bool | None, Option(help="Require the session's secret. Default: unless the bind address is loopback.")
    ] = None,
) -> None:
    """Serve agents and record their conversations.

    POST /sessions returns a URL and a secret: base_url and api_key of any OpenAI client. POST /sessions/ID/seal
    returns the files of the rollout. After a restart on the same port, open sessions continue.
    """
    from headpond import config as configuration
    from headpond.servers.sessions import session_server

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    flags = {
        "sessions.host": host,
        "sessions.port": port,
        "sessions.processes": processes,
        "engine.urls": engine_urls,
        "policy.renderer": policy_renderer,
        "sessions.mode": mode,
        "sessions.instance_id": instance_id,
        "engine.routed_experts": engine_routed_experts,
        "sessions.proxy_allow": proxy_allow,
        "store": store,
        "sessions.require_secret": require_secret,
    }
    loaded = configuration.load(config, flags=flags, section="sessions")
    if loaded.sessions.processes == 1:
        session_server.serve(loaded)
    else:
        from headpond.commands.session_processes import supervise

        raise Exit(supervise(loaded, sys.argv[2:]))
