"""`penstock engine`: a small inference server without a model."""

import logging
from typing import Annotated

from typer import Option

from services.engine.draws import WRITTEN, Distribution
from services.engine.settings import Dialect, EngineSettings, FailureRates, Form, RouteShape

USUAL = EngineSettings()


def engine(
    host: Annotated[str, Option(help="Whoever reaches it may use it.")] = USUAL.host,
    port: Annotated[int, Option(help="0: any free one; the log says which.")] = USUAL.port,
    dialect: Annotated[Dialect, Option(help="Of /v1/chat/completions.")] = USUAL.dialect,
    model: str = USUAL.model,
    seed: Annotated[int, Option(help="Engines of one seed give the same answers.")] = USUAL.seed,
    skill: Annotated[float, Option(min=0, max=1, help="Share of good answers.")] = USUAL.skill,
    latency: Annotated[str, Option(help=f"Seconds: {WRITTEN}.")] = str(USUAL.latency_s),
    length: Annotated[str, Option(help="Tokens of an answer, likewise.")] = str(USUAL.completion_tokens),
    layers: Annotated[int, Option(min=0, help="MoE layers; 0: no routed experts.")] = 0,
    topk: int = 8,
    experts: int = 128,
    form: Annotated[Form | None, Option(help="Of routed experts; default: the dialect's own.")] = None,
    failures: Annotated[str, Option(help="Shares: error=S,malformed=S,hang=S,disconnect=S.")] = "",
    max_model_len: Annotated[int, Option(min=1)] = USUAL.max_model_len,
) -> None:
    """Serve chat completions without a model: what is answered depends on nothing but the request.

    Speaks vLLM's dialect or SGLang's, and /inference/v1/generate; knows the questions of the built-in environments.
    POST /update_weights {"weight_version": N} publishes a policy version.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    from services.engine.server import serve

    serve(
        EngineSettings(
            host=host,
            port=port,
            dialect=dialect,
            model=model,
            seed=seed,
            skill=skill,
            latency_s=Distribution.parse(latency),
            completion_tokens=Distribution.parse(length),
            routes=RouteShape(layers=layers, topk=topk, experts=experts, form=form) if layers else None,
            failures=FailureRates.parse(failures),
            max_model_len=max_model_len,
        )
    )
