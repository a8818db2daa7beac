"""The converters against SkyRL's and verl's own definitions, read and run from their wheels.

Neither package can be imported without a GPU's libraries, so their checks are taken out of the source as it is.
"""

import ast
import asyncio
import logging
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.documents import ROOT, Page
from support.rollouts import drawn, plan_of, seal
from support.stores import directory_store
from support.torch_batches import seal_groups, sealed

from headpond import BatchReader
from headpond.batches import read_trainer
from headpond.trainers.skyrl import to_generator_output
from headpond.trainers.verl import to_transfer_queue

WHEELS = ROOT / ".venv-wheels"
GENERATORS, TRAINER_UTILS = "skyrl/train/generators/base.py", "skyrl/train/utils/trainer_utils.py"
SUPPORT = "skyrl/backends/skyrl_train/utils/sample_support.py"
ROUTES = "skyrl/backends/skyrl_train/utils/routed_experts.py"
AGENT_LOOP, TRAINER = "verl/trainer/ppo/v1/agent_loop_tq.py", "verl/trainer/ppo/v1/trainer_base.py"


def source(path: str) -> ast.Module:
    found = sorted(WHEELS.glob(f"{path.partition('/')[0]}-*.whl"))
    assert found, f"no wheel in {WHEELS}: run `make test-torch`"
    with zipfile.ZipFile(found[-1]) as wheel:
        return ast.parse(wheel.read(path))


def definitions(path: str, *names: str, **known: Any) -> dict[str, Any]:
    """Functions, classes and constants of a module, run without its imports."""
    module = source(path)
    module.body = [node for node in module.body if name_of(node) in names]
    assert [name_of(node) for node in module.body] == list(names), "in this order"
    module.body.insert(0, ast.ImportFrom("__future__", [ast.alias("annotations")], 0))  # their names are not there
    space = dict(known)
    exec(compile(ast.fix_missing_locations(module), path, "exec"), space)
    return space


def name_of(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", None)


def function(path: str, name: str) -> ast.AST:
    return next(node for node in ast.walk(source(path)) if getattr(node, "name", None) == name)


# SkyRL


@pytest.fixture(scope="module")
def skyrl() -> dict[str, Any]:
    field = definitions(SUPPORT, "SAMPLE_SUPPORT_PADDING", "SAMPLE_SUPPORT_FIELD", "validate_sample_support", np=np)
    checks = ("validate_generator_output", "_validate_per_token_side_channels", "_validate_step_wise_fields")
    known = {"np": np, "logger": logging.getLogger("skyrl"), "SAMPLE_SUPPORT_FIELD": field["SAMPLE_SUPPORT_FIELD"]}
    return {
        **field,
        **definitions(ROUTES, "compact_routed_expert_indices", np=np),
        **definitions(TRAINER_UTILS, *checks, **known),
        **definitions(GENERATORS, "TrajectoryID", dataclass=dataclass),
    }


def test_skyrls_generator_output_has_every_field_that_is_given(tmp_path: Path, skyrl: dict[str, Any]) -> None:
    [batch] = sealed(tmp_path, experts="uint8")
    output = to_generator_output(batch, skyrl["TrajectoryID"])
    declared = [node for node in ast.walk(function(GENERATORS, "GeneratorOutput")) if isinstance(node, ast.AnnAssign)]
    fields = {ast.unparse(node.target) for node in declared}
    assert output.keys() <= fields
    required = fields - {"trajectory_time_splits", "env_metrics", "pixel_values", "image_grid_thw"}
    assert output.keys() == required, "all but what is for images, timing and its own environments"


def test_skyrl_accepts_a_batch(tmp_path: Path, skyrl: dict[str, Any]) -> None:
    """Of several samples a rollout, with routes; and of single samples."""
    [batch] = sealed(tmp_path, experts="uint8")
    output = to_generator_output(batch, skyrl["TrajectoryID"])
    skyrl["validate_generator_output"](3, output, step_wise=True, routes_expected=True)
    for rows in output["rollout_expert_indices"]:
        assert skyrl["compact_routed_expert_indices"](rows).dtype == rows.dtype
    ids = output["trajectory_ids"]
    torn = {**output, "trajectory_ids": [ids[0], ids[2], ids[1], ids[3]]}
    with pytest.raises(AssertionError, match="contiguous"):
        skyrl["validate_generator_output"](3, torn, step_wise=True)


def test_skyrl_accepts_what_truncation_left(tmp_path: Path, skyrl: dict[str, Any]) -> None:
    store = directory_store(tmp_path / "store")
    seal(store, plan_of([drawn(store, "g1-0", masks=True), drawn(store, "g1-1", masks=False)]))
    output = to_generator_output(next(BatchReader(tmp_path, data_rank=0, data_ranks=1)), skyrl["TrajectoryID"])
    skyrl["validate_generator_output"](2, output)
    for rows in output["rollout_sample_support"]:
        skyrl["validate_sample_support"](rows)


def test_the_generator_of_the_guide_returns_steps_and_acknowledges_them(
    tmp_path: Path, skyrl: dict[str, Any], modules: dict[str, ModuleType]
) -> None:
    seal_groups(tmp_path, steps=2)
    base = modules["skyrl.train.generators.base"]
    base.GeneratorInterface, base.TrajectoryID = object, skyrl["TrajectoryID"]  # type: ignore[attr-defined]
    generator = guide("HeadpondGenerator")["HeadpondGenerator"](tmp_path)
    for acked in (-1, 0):
        output = asyncio.run(generator.generate({"prompts": [None] * 4}))
        skyrl["validate_generator_output"](4, output)
        assert read_trainer(tmp_path).acked == acked


# verl


def strings(node: ast.AST) -> list[str]:
    return [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def test_verl_finds_the_fields_and_tags_that_it_reads(tmp_path: Path) -> None:
    [batch] = sealed(tmp_path, experts="uint8")
    _, fields, tags = to_transfer_queue(batch, ["prompt"], global_steps=5)
    put = function(AGENT_LOOP, "_agent_loop_postprocess")
    [tag] = [node for node in ast.walk(put) if isinstance(node, ast.Dict) and "seq_len" in strings(node)]
    written = {key.value for key in tag.keys if isinstance(key, ast.Constant)}
    assert {frozenset(each) for each in tags} == {frozenset(written)}
    computed = {"old_log_probs", "ref_log_prob", "values", "advantages", "returns", "token_level_rewards"}
    for name in ("_compute_advantage", "_compute_metrics"):
        reads = next(
            node.value for node in ast.walk(function(TRAINER, name))
            if isinstance(node, ast.Assign) and name_of(node) == "fields" and isinstance(node.value, ast.List)
        )  # fmt: skip
        for entry in fields:
            assert set(strings(reads)) - computed <= entry.keys(), name


def test_verls_tensordict_can_hold_the_fields(tmp_path: Path) -> None:
    """It stacks tensors of one shape and nests others; every entry has the same fields."""
    [batch] = sealed(tmp_path, experts="uint8")
    _, fields, _ = to_transfer_queue(batch, ["prompt"], global_steps=5)
    assert len({frozenset(entry) for entry in fields}) == 1
    for name, value in fields[0].items():
        if isinstance(value, torch.Tensor):
            nested = torch.nested.as_nested_tensor([entry[name] for entry in fields], layout=torch.jagged)
            assert nested.offsets().diff().tolist() == [len(entry[name]) for entry in fields]


def test_what_the_guide_puts_into_the_queue_is_a_finished_group(tmp_path: Path, modules: dict[str, ModuleType]) -> None:
    """By the rules of verl's replay buffer: the prompt's entry has a terminal status, and keys begin with its id."""
    [batch] = sealed(tmp_path)
    queue = dict[str, Any]()

    def keep(keys: list[str], tags: list[Any], partition_id: str, fields: Any = None) -> None:
        queue.update(zip(keys, tags, strict=True))

    modules["transfer_queue"].kv_batch_put = keep  # type: ignore[attr-defined]
    modules["verl.utils.tensordict_utils"].list_of_dict_to_tensordict = list  # type: ignore[attr-defined]
    guide("to_transfer_queue")["put"](batch, ["prompt"], 5)
    prompt = queue.pop("prompt")
    assert prompt == {"is_prompt": True, "status": "finished", "global_steps": 5}
    assert {key.split("_")[0] for key in queue} == {"prompt"}
    assert {tag["status"] for tag in queue.values()} == {"success"}


# The guide


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules that the guide's scripts import."""
    names = ("skyrl", "skyrl.train", "skyrl.train.generators", "skyrl.train.generators.base", "transfer_queue", "verl")
    made = {name: ModuleType(name) for name in (*names, "verl.utils", "verl.utils.tensordict_utils")}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def guide(word: str) -> dict[str, Any]:
    [block] = [each for each in Page(ROOT / "docs" / "trainers.md").blocks("python") if word in each]
    script: dict[str, Any] = {}
    exec(block, script)
    return script
