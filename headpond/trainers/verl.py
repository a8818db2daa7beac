"""verl (0.9, V1 trainer): a batch as the keys, fields and tags that its agent loop puts into the
TransferQueue.

Groups take the place of verl's prompts: verl's replay buffer finds them under the ids that verl
assigned.
"""

from importlib import import_module
from typing import Any

import numpy as np

from headpond.batches.reader import Batch
from headpond.errors import BatchError
from headpond.trainers.samples import samples_of


def to_transfer_queue(
    batch: Batch, uids: list[str], *, global_steps: int
) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """Convert a batch. `uids` are verl's prompts, as many as the batch has groups. verl computes
    advantages itself, from `rm_scores`; Headpond's are in `extra_fields`."""
    torch: Any = import_module("torch")
    if len(uids) != (groups := len(batch.plan.groups)):
        has = f"step {batch.step} has {groups}: set batch.size to verl's data.train_batch_size"
        raise BatchError(f"verl asks for {len(uids)} groups, {has} (batch.size = {len(uids)})")
    keys, fields, tags = list[str](), list[dict[str, Any]](), list[dict[str, Any]]()
    for sample in samples_of(batch, routes=True):
        uid, prompt, total = uids[sample.group], sample.prompt_length, int(sample.input_ids.size)
        ids = torch.tensor(sample.input_ids.tolist(), dtype=torch.int64)
        mask = torch.tensor(sample.after_prompt(sample.loss_mask), dtype=torch.int64)
        routes, routed = sample.routed_experts, dict[str, Any]()
        if routes is not None:  # Routes of all tokens; 0 where the engine sent none.
            routed = {"routed_experts": torch.tensor(np.maximum(routes, 0).tolist(), dtype=torch.int16)}
        scores = torch.zeros(total - prompt)
        scores[-1:] = sample.rollout.reward
        keys.append(f"{uid}_{sample.rollout_number}_{sample.sample_in_rollout}")
        fields.append({
            "uid": uid,
            "prompts": ids[:prompt],
            "responses": ids[prompt:],
            "input_ids": ids,
            "response_mask": mask,
            "loss_mask": mask,
            "position_ids": torch.arange(total),
            "rollout_log_probs": torch.tensor(sample.after_prompt(sample.logprobs)),
            "rm_scores": scores,
            "num_turns": 2 * sample.completions,
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
