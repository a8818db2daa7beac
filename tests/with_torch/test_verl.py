"""A batch in the fields that verl's agent loop puts into the TransferQueue."""

from pathlib import Path

import pytest
import torch
from support.torch_batches import sealed

from headpond.errors import BatchError
from headpond.trainers.verl import to_transfer_queue

FIELDS = {
    "uid", "num_turns", "rm_scores", "extra_fields", "prompts", "responses", "input_ids", "response_mask", "loss_mask",
    "position_ids", "rollout_log_probs",
}  # fmt: skip
TAGS = {"status", "prompt_len", "response_len", "seq_len", "global_steps", "min_global_steps", "max_global_steps"}


def test_every_sample_has_verls_key_fields_and_tags(tmp_path: Path) -> None:
    [batch] = sealed(tmp_path, experts="uint8")
    keys, fields, tags = to_transfer_queue(batch, ["prompt"], global_steps=5)
    assert keys == ["prompt_0_0", "prompt_0_1", "prompt_1_0", "prompt_2_0"]
    assert [entry["num_turns"] for entry in fields] == [4, 2, 2, 2]
    assert {entry["uid"] for entry in fields} == {"prompt"}, "advantages are computed by uid"
    for entry, tag in zip(fields, tags, strict=True):
        assert entry.keys() >= FIELDS
        assert tag.keys() == TAGS
        assert torch.equal(torch.cat([entry["prompts"], entry["responses"]]), entry["input_ids"])
        response = len(entry["responses"])
        assert tag["seq_len"] == tag["prompt_len"] + response == len(entry["position_ids"])
        assert len(entry["response_mask"]) == len(entry["rollout_log_probs"]) == len(entry["rm_scores"]) == response
        assert entry["routed_experts"].shape == (tag["seq_len"], 2, 3)
        assert entry["routed_experts"].dtype == torch.int16
        rollout = {each.rollout: each for each in batch.plan.rollouts}[entry["extra_fields"]["rollout"]]
        assert (tag["min_global_steps"], tag["max_global_steps"]) == (rollout.version_first, rollout.version_last)
        assert tag["global_steps"] == 5


def test_a_step_with_another_number_of_groups_names_the_settings(tmp_path: Path) -> None:
    [batch] = sealed(tmp_path)
    with pytest.raises(BatchError, match=r"asks for 2 groups, step 0 has 1.*batch.size = 2"):
        to_transfer_queue(batch, ["one", "two"], global_steps=5)
