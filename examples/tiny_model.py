"""A tiny chat model with a tokenizer, to follow the quickstart without a GPU: 100,000 parameters, made in a minute.

    python examples/tiny_model.py DIR

Run it with a Python that has torch and transformers, such as vLLM's. The model answers the questions of
examples/start/sums.py, in the form that they ask for one time in four, and adds correctly about two times in five.
Reinforcement learning raises both.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

NUMBERS = range(10, 50)
FORMS = ["Answer: {}", "Answer: {}.", "Answer: {}!", "Answer: {}, I think."]
"""of its answers: only the first is what sums.py asks for"""
STEPS, BATCH, LEARNING_RATE = 1200, 64, 3e-3
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,  # vLLM for CPU does not reload tied ones
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def conversation(chance: random.Random) -> list[dict[str, str]]:
    a, b = chance.choice(NUMBERS), chance.choice(NUMBERS)
    question = f"What is {a} + {b}? End with a line `Answer: N`."
    answer = chance.choice(FORMS).format(a + b)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def save_tokenizer(directory: Path) -> Any:
    """Byte-level BPE; the numbers of two digits are tokens."""
    chance = random.Random(0)  # noqa: S311 - no secret
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    texts = [message["content"] for _ in range(2000) for message in conversation(chance)]
    tokenizer.train_from_iterator([*texts, *(f" {number}" for number in range(100))], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    settings |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return AutoTokenizer.from_pretrained(directory)


def trained(tokenizer: Any, seed: int) -> Any:
    torch.set_num_threads(1)  # a model as small as this is slower on more
    torch.manual_seed(seed)
    chance = random.Random(seed)  # noqa: S311 - no secret
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **ids, vocab_size=len(tokenizer)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    question = tokenizer.apply_chat_template(conversation(chance)[:1], add_generation_prompt=True, tokenize=False)
    asked = len(tokenizer(question, add_special_tokens=False).input_ids)  # the same for all: a number is one token
    for step in range(STEPS):
        texts = [tokenizer.apply_chat_template(conversation(chance), tokenize=False) for _ in range(BATCH)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        labels[:, :asked] = -100  # learns to answer, not to ask
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1} of {STEPS}: loss {loss.item():.3f}", flush=True)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", type=Path, help="Directory to write to. It is created.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.directory.exists():
        raise SystemExit(f"{options.directory} exists: choose another directory, or remove it")
    trained(save_tokenizer(options.directory), options.seed).save_pretrained(options.directory)
    print(f"wrote {options.directory}")
