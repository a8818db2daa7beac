"""`penstock engine`: a small inference server without a model."""

import logging
from typing import Annotated, Literal

from typer import Option

from cli.output import LOG_FORMAT

Dialect = Literal["vllm", "sglang"]
Form = Literal["object", "npy", "bare", "lists"]


def engine(
    host: Annotated[str, Option(help="Whoever reaches it may use it.")] = "127.0.0.1",
    port: Annotated[int, Option(help="0: any free one; the log says which.")] = 8000,
    dialect: Annotated[Dialect, Option(help="Of /v1/chat/completions.")] = "vllm",
    seed: Annotated[int, Option(help="Engines of one seed give the same answers.")] = 0,
    skill: Annotated[float, Option(min=0, max=1, help="Share of good answers.")] = 0.5,
    latency: Annotated[
        str, Option(help="Seconds: constant:S, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA.")
    ] = "constant:0",
    length: Annotated[str, Option(help="Tokens of an answer, likewise.")] = "lognormal:120:0.5",
    layers: Annotated[int, Option(min=0, help="MoE layers; 0: no routed experts.")] = 0,
    topk: Annotated[int, Option(help="Experts a token and layer.")] = 8,
    experts: Annotated[int, Option(help="Experts a layer.")] = 128,
    form: Annotated[Form | None, Option(help="Of routed experts; default: the dialect's own.")] = None,
    failures: Annotated[str, Option(help="Shares: error=S,malformed=S,hang=S,disconnect=S")] = "",
    max_model_len: Annotated[int, Option(min=1, help="Tokens of prompt and answer.")] = 131_072,
) -> None:
    """Answer as an inference server would, without a model.

    Speaks vLLM's dialect or SGLang's, and /inference/v1/generate. What is said depends on nothing but the request.
    POST /update_weights {"weight_version": N} publishes a policy version.
    """
    from services.engine import server, settings

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    routes = settings.RouteShape(layers=layers, topk=topk, experts=experts, form=form and settings.Form(form))
    server.serve(
        settings.EngineSettings(
            host=host,
            port=port,
            dialect=settings.Dialect(dialect),
            seed=seed,
            skill=skill,
            latency_s=settings.Distribution.parse(latency),
            completion_tokens=settings.Distribution.parse(length),
            routes=routes,
            failures=settings.FailureRates.parse(failures),
            max_model_len=max_model_len,
        )
    )
