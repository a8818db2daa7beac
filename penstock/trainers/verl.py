"""verl (0.9, V1 trainer): a batch as the keys, fields and tags that its agent loop puts into the TransferQueue.

keys, fields, tags = to_transfer_queue(batch, global_steps=step)
await tq.async_kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train")
"""

from importlib import import_module
from typing import Any

import numpy as np

from penstock.batches.reader import Batch
from penstock.trainers.samples import samples_of


def to_transfer_queue(
    batch: Batch, *, global_steps: int
) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """verl computes advantages itself, from `rm_scores`; `advantage` of Penstock is in `extra_fields`."""
    torch: Any = import_module("torch")
    tensor, int64 = torch.tensor, torch.int64
    keys, fields, tags = list[str](), list[dict[str, Any]](), list[dict[str, Any]]()
    for sample in samples_of(batch, routes=True):
        prompt, total = sample.prompt_length, int(sample.input_ids.size)
        mask = tensor(sample.after_prompt(sample.loss_mask), dtype=int64)
        ids = tensor(sample.input_ids.tolist(), dtype=int64)
        routes, routed = sample.routed_experts, dict[str, Any]()
        if routes is not None:  # of all tokens; 0 where the engine sent none
            routed = {"routed_experts": tensor(np.maximum(routes, 0).tolist(), dtype=torch.int16)}
        scores = np.zeros(total - prompt, np.float32)
        scores[-1:] = sample.rollout.reward
        keys.append(f"{sample.rollout.group}_{sample.rollout_number}_{sample.sample_in_rollout}")
        fields.append({
            "prompts": ids[:prompt],
            "responses": ids[prompt:],
            "input_ids": ids,
            "response_mask": mask,
            "loss_mask": mask,
            "position_ids": tensor(list(range(total)), dtype=int64),
            "rollout_log_probs": tensor(sample.after_prompt(sample.logprobs)),
            "rm_scores": tensor(scores.tolist()),
            "extra_fields": {"advantage": sample.advantage, "rollout": sample.rollout.rollout},
            **routed,
        })  # fmt: skip
        tags.append({
            "status": "success",
            "prompt_len": prompt,
            "response_len": total - prompt,
            "seq_len": total,
            "global_steps": global_steps,
            "min_global_steps": sample.rollout.version_first,
            "max_global_steps": sample.rollout.version_last,
        })  # fmt: skip
    return keys, fields, tags
