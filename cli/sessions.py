"""`penstock sessions`: one URL a rollout for agents that speak to an OpenAI-compatible server."""

import logging
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from cli.output import LOG_FORMAT

Mode = Literal["linear", "open"]


def sessions(
    config: Annotated[Path | None, Argument(metavar="[CONFIG.toml]", show_default=False)] = None,
    host: Annotated[str | None, Option(help="Default: 127.0.0.1. Any other requires secrets.")] = None,
    port: Annotated[int | None, Option(help="Default: 8100; 0: any free one.")] = None,
    engine_urls: Annotated[str | None, Option(help="URLs of the engine's replicas, separated by commas.")] = None,
    policy_renderer: Annotated[
        str | None, Option(help="Render prompts here: a tokenizer's directory, or bytes-chatml.")
    ] = None,
    append_roles: Annotated[str | None, Option(help="Who may continue a conversation: tool,user")] = None,
    mode: Annotated[Mode | None, Option(help="Default: linear with a renderer, else open.")] = None,
    instance_id: Annotated[str | None, Option(help="32 hex digits; default: random.")] = None,
    engine_routed_experts: Annotated[
        bool | None, Option("--engine-routed-experts", help="Request routed experts.")
    ] = None,
    proxy_allow: Annotated[str | None, Option(help="More paths for agents: /v1/embeddings,...")] = None,
    cpu_workers: Annotated[int | None, Option(help="Threads for large bodies; default: cores.")] = None,
    store: Annotated[str | None, Option(help="file:///...; default: as the configuration says.")] = None,
    require_secret: Annotated[bool | None, Option(help="Default: unless the host is loopback.")] = None,
) -> None:
    """Record what agents say to the policy, each under a URL of its own.

    POST /sessions gives a URL and a secret: base_url and api_key of any OpenAI client. POST /sessions/ID/seal gives
    the rollout's files. Started again on the same port, it goes on with the sessions that it had.
    """
    from penstock import config as configuration
    from services.sessions import serving

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    flags = {
        "sessions.host": host,
        "sessions.port": port,
        "engine.urls": engine_urls,
        "policy.renderer": policy_renderer,
        "sessions.append_roles": append_roles,
        "sessions.mode": mode,
        "sessions.instance_id": instance_id,
        "engine.routed_experts": engine_routed_experts,
        "sessions.proxy_allow": proxy_allow,
        "sessions.cpu_workers": cpu_workers,
        "store": store,
        "sessions.require_secret": require_secret,
    }
    serving.serve(configuration.load(config, flags=flags, section="sessions"))
