"""A trainer for a Hugging Face model: the clipped policy gradient of each batch, on any number of data ranks.

    torchrun --nproc-per-node 2 examples/grpo_torch.py RUN_DIR MODEL_DIR OUTPUT_DIR

Headpond loads the weights into the engine (`[engine] weight_update = "headpond"`). Killed at any time, it resumes from
its last checkpoint to the same weights.
"""

import argparse
import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from headpond import BatchReader
from headpond.torch import Alignment, clipped_objective, padded, replayed_routing, token_logprobs

KEPT = 4  # directories of weights: the engine may still load the one before the last


def main(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    checkpoint = options.output / "checkpoint.pt"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    resume_step = saved["step"] if saved else None
    dist.barrier()  # every rank has read the same checkpoint
    reader = BatchReader(options.run_dir, data_rank=rank, data_ranks=ranks, resume_step=resume_step)
    if saved and rank == 0:
        reader.publish_policy(saved["step"] + 1, weights=save_weights(model, options, saved["step"] + 1))
    for batch in reader:
        for group in optimizer.param_groups:  # Adam's first steps are as long as later ones, and know less
            group["lr"] = options.lr * min(1.0, (batch.step + 1) / (options.warmup + 1))
        metrics, logprobs = train(model, optimizer, batch)
        reader.annotate(batch, logprobs=logprobs)  # for the dashboard: KL, and the mismatch of each token
        reader.ack(batch.step)
        if rank == 0:
            weights = save_weights(model, options, batch.step + 1)
            if (batch.step + 1) % options.checkpoint_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": batch.step}
                torch.save(state, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
                reader.checkpointed(batch.step)
            reader.publish_policy(batch.step + 1, weights=weights)
            with (options.output / "training.jsonl").open("a") as log:
                log.write(json.dumps({"step": batch.step, **metrics}) + "\n")
            print(
                f"step {batch.step}:", ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True
            )
    dist.destroy_process_group()


def train(model: Any, optimizer: Any, batch: Any) -> tuple[dict[str, float], list[Any]]:
    computed: list[Any] = []
    alignment, rewards = Alignment(), [rollout.reward for rollout in batch.plan.rollouts]
    routed = any(rollout.experts for rollout in batch.plan.rollouts)
    optimizer.zero_grad()
    for micro_batch in batch.micro_batches():
        tensors = padded(micro_batch)
        with replayed_routing(model, tensors) if routed else contextlib.nullcontext():
            logprobs = token_logprobs(model(**tensors.model_inputs()).logits, tensors)
        alignment.add(logprobs, tensors)
        computed.append(tensors.flat(logprobs))
        clipped_objective(logprobs, tensors, batch.totals.denominator).backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)  # sums: the denominator is that of all ranks
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    reward = sum(rewards) / len(rewards)
    return {"reward": reward, "kl": alignment.kl, "max": alignment.max, "norm": float(norm)}, computed


def save_weights(model: Any, options: argparse.Namespace, version: int) -> Path:
    """In the layout of the first model, with its tokenizer."""
    directory = options.output / "weights" / str(version)
    shutil.copytree(options.model, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(directory)
    shutil.rmtree(options.output / "weights" / str(version - KEPT), ignore_errors=True)
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("run_dir", "model", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--warmup", type=int, default=0, help="Steps over which the learning rate grows to --lr.")
    parser.add_argument("--checkpoint-every", type=int, default=5)
    main(parser.parse_args())
