"""Routed experts that were requested and not sent: `engine.absent_routes` decides, and every rollout counts them."""

from pathlib import Path
from typing import Any

import pytest
from support.engine_clients import attempt_of, loaded, run, stage_of
from support.stores import directory_store
from support.upstream import ReceivedRequest, Response, answer, serving, user

from headpond.config import RunConfig
from headpond.environments.protocol import Policy
from headpond.errors import InfrastructureFailure
from headpond.playing.rollout import play
from headpond.records.inputs import GroupInputs
from headpond.records.rollout import RolloutResult
from headpond.store.columns import read_columns
from headpond.tasks import inputs
from headpond.tasks.stage import Call, PlanMessage
from headpond.tasks.stages.filter import filter_group


class TwoQuestions:
    async def rollout(self, example: Any, policy: Policy) -> float:
        messages: list[dict[str, Any]] = []
        for question in ("one", "two"):
            messages.append(user(question))
            messages.append(dict((await policy.chat(messages)).message))
        return 1.0


def with_experts(request: ReceivedRequest) -> Response:
    return Response(body=answer(request, "yes", routed=True))


def without_experts(request: ReceivedRequest) -> Response:
    return Response(body=answer(request, "yes"))


def first_without(request: ReceivedRequest) -> Response:
    return with_experts(request) if len(request.messages) > 1 else without_experts(request)


def played(root: Path, *urls: str, rollout: str = "r1", **engine: Any) -> RolloutResult:
    results: list[RolloutResult] = []

    async def main() -> None:
        async with stage_of(root, *urls, routed_experts=True, retries=1, **engine) as stage:
            results.append(await play(stage, loaded(TwoQuestions()), 0, attempt_of(rollout)))

    run(main)
    return results[0]


def test_by_default_the_request_is_repeated_on_another_replica(tmp_path: Path) -> None:
    with serving(without_experts) as bare, serving(with_experts) as good:
        result = played(tmp_path, bare.url, good.url)
        assert (result.metrics["absent_routes"], result.metrics["missing_routes"]) == (0, 0)
        assert (len(bare.received), result.metrics["engine_failures"]) == (1, 1)
        assert result.experts is not None


def test_if_no_replica_sends_them_the_failure_names_the_flag(tmp_path: Path) -> None:
    with (
        serving(without_experts) as bare,
        pytest.raises(InfrastructureFailure, match=r"--enable-return-routed-experts, or set engine\.absent_routes"),
    ):
        played(tmp_path, bare.url)


def test_a_turn_without_them_can_be_masked(tmp_path: Path) -> None:
    with serving(first_without) as server:
        result = played(tmp_path, server.url, absent_routes="mask")
    assert result.columns is not None
    columns = read_columns(directory_store(tmp_path), result.columns)
    trained = [columns.loss_mask[start:end].tolist() for start, end in zip(columns.turns.start, columns.turns.end)]  # noqa: B905
    assert trained == [[0, 0, 0], [1, 1, 1]]
    assert result.metrics["absent_routes"] == 1
    assert result.metrics["missing_routes"] > 0


def test_a_rollout_without_any_is_counted_and_not_left_out_of_the_mean(tmp_path: Path) -> None:
    with serving(without_experts) as bare, serving(with_experts) as good:
        none = played(tmp_path, bare.url, rollout="r1", absent_routes="drop")
        all_ = played(tmp_path, good.url, rollout="r2", absent_routes="drop")
    assert none.experts is None
    assert none.columns is not None
    tokens = read_columns(directory_store(tmp_path), none.columns).input_ids.size
    assert (none.metrics["absent_routes"], none.metrics["missing_routes"]) == (2, tokens - 1)
    assert (all_.metrics["absent_routes"], all_.metrics["missing_routes"]) == (0, 0)
    members = {"r1": none, "r2": all_}
    group = GroupInputs(group="g0", environment="test", example=0, policy_version=0, members=members)
    for mode, dropped in (("drop", {"r1": "absent_routes"}), ("mask", {})):
        config = RunConfig.model_validate({"store": f"file://{tmp_path}", "engine": {"absent_routes": mode}})
        message = PlanMessage(run="r", job="g0-filter", attempt=1, sequence=1, timeout_s=1.0, plan="plans/r.g0.json")
        inputs.write(directory_store(tmp_path), message.plan, group)
        assert filter_group(Call(message=message, execution="x", config=config)).dropped == dropped
