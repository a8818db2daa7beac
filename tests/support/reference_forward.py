"""Hugging Face's forward pass, the reference of recorded logprobs and routed experts. Run with the Python of a vLLM
environment, without vLLM itself.

Each line of stdin is a JSON object {"model": DIR, "adapter": DIR or null, "ids": [...], "temperature": [...]}: a
sequence, and the temperature of each token. The line of stdout has "logprobs", of each token given those before it (the
first has 0), and "experts" [tokens, layers, top-k], empty for a dense model.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

MODELS = 16
"""kept in memory"""


@functools.lru_cache(MODELS)
def loaded(directory: str, adapter: str | None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    if adapter:
        add_adapter(model, Path(adapter))
    return model


def add_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Merge a LoRA adapter: W + alpha / r * B A."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors, weights = load_file(directory / "adapter_model.safetensors"), dict(model.named_parameters())
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            b = tensors[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            with torch.no_grad():
                weights[target] += config["lora_alpha"] / config["r"] * (b @ a)


@torch.inference_mode()
def forward(model: PreTrainedModel, ids: list[int], temperature: list[float]) -> dict[str, Any]:
    experts: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        experts.append(output[2])  # of a router: logits, weights, experts

    hooks = [module.register_forward_hook(keep) for name, module in model.named_modules() if is_router(module)]
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    scaled = logits[:-1] / torch.tensor(temperature[1:])[:, None]
    picked = scaled.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {
        "logprobs": [0.0, *picked.tolist()],
        "experts": torch.stack(experts, 1).tolist() if experts else [],
    }


def is_router(module: Any) -> bool:
    return type(module).__name__.endswith("TopKRouter")


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        model = loaded(request["model"], request.get("adapter"))
        sys.stdout.write(json.dumps(forward(model, request["ids"], request["temperature"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
