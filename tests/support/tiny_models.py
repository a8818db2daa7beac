"""Tiny Qwen3 models from a seed, which chat, think and call a tool. Run with the Python of a vLLM environment.

    python tiny_models.py DIRECTORY TOKENIZER_DIR KIND

DIRECTORY/moe/0 (mixture of experts) and DIRECTORY/dense/0 are trained on conversations for some seconds, KIND longer
than the other; 1 to 3 are the same weights with seeded noise, to be loaded as later versions; DIRECTORY/lora/1 and 2
are adapters of dense/0.
"""

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SEED = 7
VERSIONS = 4
NOISE = 0.1
"""of a later version, relative to the deviation of each weight: logprobs differ by about 0.01 to 1"""
STEPS, BATCH, LEARNING_RATE = 220, 8, 4e-3
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,  # vLLM for CPU does not reload tied ones
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SUBJECTS = ["The quick brown fox", "The lazy dog", "The gated pipe", "The turbine", "The assistant"]
VERBS = ["jumps over", "feeds", "waits for", "does not mind", "calls"]


def conversation(chance: random.Random) -> dict[str, Any]:
    """Arguments of `apply_chat_template`."""
    kind = chance.choice(["tool", "chat", "chat", "think"])
    if kind == "tool":
        a, b = chance.randint(1, 30), chance.randint(1, 30)
        call = {"name": "add", "arguments": {"a": a, "b": b}}
        messages = [
            {"role": "user", "content": f"What is {a} plus {b}?"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": str(a + b)},
            {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
        ]
        return {"conversation": messages, "tools": [ADD]}
    messages = []
    for _ in range(chance.randint(1, 3)):
        messages.append({"role": "user", "content": f"Say something, {chance.randint(1, 99)}."})
        messages.append({"role": "assistant", "content": sentences(chance, 1, 5)})
    if kind == "think":
        messages[-2:] = [
            {"role": "user", "content": "Think, then say something."},
            {"role": "assistant", "content": sentences(chance, 1, 1), "reasoning_content": sentences(chance, 2, 6)},
        ]
    return {"conversation": messages}


def sentences(chance: random.Random, fewest: int, most: int) -> str:
    return " ".join(
        f"{chance.choice(SUBJECTS)} {chance.choice(VERBS)} {chance.choice(SUBJECTS).lower()}."
        for _ in range(chance.randint(fewest, most))
    )


def train(model: PreTrainedModel, tokenizer: Any, steps: int) -> None:
    chance = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        texts = [tokenizer.apply_chat_template(**conversation(chance), tokenize=False) for _ in range(BATCH)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=False, add_special_tokens=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def save_versions(model: PreTrainedModel, tokenizer_dir: Path, directory: Path) -> None:
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for version in range(VERSIONS):
        noise = torch.Generator().manual_seed(SEED + version)
        for name, tensor in model.state_dict().items():
            factor = NOISE * trained[name].std() if version and trained[name].ndim > 1 else 0.0
            tensor.copy_(trained[name] + factor * torch.randn(tensor.shape, generator=noise))
        model.save_pretrained(directory / str(version))
        for file in tokenizer_dir.iterdir():
            shutil.copy(file, directory / str(version))


def save_adapter(directory: Path, version: int) -> None:
    """A LoRA adapter of the dense model in the format of peft."""
    directory.mkdir(parents=True)
    rank, noise = 4, torch.Generator().manual_seed(100 + version)
    widths = {"q_proj": SIZES["num_attention_heads"], "v_proj": SIZES["num_key_value_heads"]}
    tensors = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, heads in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, SIZES["hidden_size"], generator=noise) / 8
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(heads * SIZES["head_dim"], rank, generator=noise) / 8
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*widths], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def main(directory: Path, tokenizer_dir: Path, trained: str) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    vocabulary = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    models = {
        "moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS, **vocabulary)),
        "dense": (Qwen3ForCausalLM, Qwen3Config(**SIZES, **vocabulary)),
    }
    for name, (kind, config) in models.items():
        torch.manual_seed(SEED)
        model = kind(config)
        train(model, tokenizer, STEPS if name == trained else STEPS // 4)
        with torch.no_grad():
            save_versions(model, tokenizer_dir, directory / name)
    for version in (1, 2):
        save_adapter(directory / "lora" / str(version), version)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
