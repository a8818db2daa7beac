"""`headpond engine`: an inference server for demos and tests."""

import logging
from typing import Annotated, Literal

from typer import Option

from headpond.commands.output import LOG_FORMAT

Mode = Annotated[
    Literal["processed_logprobs", "raw_logprobs"],
    Option(help="Whether logprobs are those after or before the temperature."),
]
Latency = Annotated[str, Option(help="Seconds: constant:S, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.")]
Failures = Annotated[
    str,
    Option(
        help="Shares of failing requests (error=S,malformed=S,hang=S,disconnect=S) and of odd answers "
        "(abort=S,thought=S,sentinel=S,no_experts=S)."
    ),
]
Model = Annotated[
    Literal["tiny-moe"] | None,
    Option(
        help="Sample from a small mixture of experts, whose first weights are drawn by the seed. Options about "
        "scripted completions (skill, latency, length, layers, topk, experts) then do not apply."
    ),
]
Dialect = Literal["vllm", "sglang"]
Form = Literal["object", "npy", "bare"]


def engine(
    host: Annotated[str, Option(help="Bind address. There is no authentication.")] = "127.0.0.1",
    port: Annotated[int, Option(help="0: any free port, which is logged.")] = 8000,
    dialect: Annotated[Dialect, Option(help="API of /v1/chat/completions.")] = "vllm",
    seed: Annotated[int, Option(help="Engines with the same seed give the same completions.")] = 0,
    model: Model = None,
    skill: Annotated[float, Option(min=0, max=1, help="Share of correct completions.")] = 0.5,
    latency: Latency = "constant:0",
    length: Annotated[
        str, Option(help="Completion length distribution, e.g. lognormal:400:0.5.")
    ] = "lognormal:120:0.5",
    layers: Annotated[int, Option(min=0, help="MoE layers. 0: no routed experts.")] = 0,
    topk: Annotated[int, Option(help="Experts per token and layer.")] = 8,
    experts: Annotated[int, Option(help="Experts per layer.")] = 128,
    form: Annotated[Form | None, Option(help="Encoding of routed experts. Default: that of the dialect.")] = None,
    failures: Failures = "",
    max_model_len: Annotated[int, Option(min=1, help="Largest number of tokens of prompt and completion.")] = 131_072,
    served_model_name: Annotated[str, Option(help="Name in /v1/models.")] = "policy",
    logprobs_mode: Mode = "processed_logprobs",
    enable_auto_tool_choice: Annotated[bool, Option(help="Answer chats with tools, as vLLM with this flag.")] = True,
    dev_mode: Annotated[bool, Option(help="Serve the control endpoints, as with VLLM_SERVER_DEV_MODE=1.")] = True,
) -> None:
    """Simulate an inference server. No GPU is needed.

    Serves the chat API of vLLM or SGLang, and /inference/v1/generate. A completion is scripted: it depends only on the
    request, the seed and the weights' version; or, with --model, it is sampled. Weights are a directory with
    weights.json, {"version": N}, and the model's file, which the control endpoints of vLLM and SGLang load.
    """
    from headpond.demo.scripted_engine import http_server, options

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    routed_experts = options.ExpertShape(layers=layers, topk=topk, experts=experts, form=form)
    http_server.serve(
        options.EngineSettings(
            host=host,
            port=port,
            dialect=dialect,
            seed=seed,
            skill=skill,
            latency_s=options.Distribution.parse(latency),
            completion_tokens=options.Distribution.parse(length),
            routed_experts=routed_experts,
            failures=options.FailureRates.parse(failures),
            max_model_len=max_model_len,
            served_model_name=served_model_name,
            logprobs_mode=logprobs_mode,
            dev_mode=dev_mode,
            auto_tool_choice=enable_auto_tool_choice,
            model=model,
        )
    )
