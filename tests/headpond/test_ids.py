import os
import sqlite3
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headpond import ids
from headpond.errors import MalformedId
from headpond.ids import EncodeJobId, GroupId, LeaseId, LeaseValue, RolloutId, TaskId, WorkerId
from headpond.ledger import archive
from headpond.ledger.queries import ROLLOUT

NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,60}", fullmatch=True)
HOSTS = st.from_regex(r"[A-Za-z0-9_.:-]{1,60}", fullmatch=True)
COUNTS = st.integers(min_value=0, max_value=10**9)
JOBS = st.one_of(
    st.builds(RolloutId, NAMES, COUNTS).map(str),
    st.builds(EncodeJobId, COUNTS, COUNTS, COUNTS).map(str),
    st.builds(ids.survey_job, COUNTS, NAMES),
    *(
        st.builds(GroupId, COUNTS).map(str).map(lambda group, stage=stage: ids.group_job(group, stage))
        for stage in ("score", "filter")
    ),
)


@given(st.builds(GroupId, COUNTS))
def test_a_group_id_survives_formatting(id: GroupId) -> None:
    assert GroupId.parse(str(id)) == id


@given(st.builds(RolloutId, st.builds(GroupId, COUNTS).map(str) | NAMES, COUNTS))
def test_a_rollout_id_survives_formatting(id: RolloutId) -> None:
    assert RolloutId.parse(str(id)) == RolloutId.match(str(id)) == id


@given(st.builds(EncodeJobId, COUNTS, COUNTS, COUNTS))
def test_an_encoding_job_id_survives_formatting(id: EncodeJobId) -> None:
    assert EncodeJobId.parse(str(id)) == id


@given(st.builds(TaskId, NAMES, JOBS, COUNTS))
def test_a_task_id_survives_formatting(id: TaskId) -> None:
    assert TaskId.match(str(id)) == id
    assert LeaseId.match(str(id)) is None


@given(st.builds(LeaseId, NAMES, JOBS, COUNTS, NAMES))
def test_a_lease_id_survives_formatting(id: LeaseId) -> None:
    assert LeaseId.match(str(id)) == id
    assert str(id).startswith(f"{id.task}.")
    assert TaskId.match(str(id)) is None


@given(st.builds(LeaseValue, HOSTS, COUNTS, st.none() | HOSTS.map("http://{}:8000".format)))
def test_a_lease_value_survives_formatting(value: LeaseValue) -> None:
    assert LeaseValue.match(str(value)) == value


@given(st.builds(WorkerId, HOSTS, COUNTS))
def test_a_worker_id_survives_formatting(id: WorkerId) -> None:
    assert WorkerId.parse(str(id)) == id


@given(st.text())
@pytest.mark.parametrize("kind", [RolloutId, TaskId, LeaseId, LeaseValue])
def test_a_matched_id_formats_back_to_the_same_text(kind: Any, text: str) -> None:
    matched = kind.match(text)
    assert matched is None or str(matched) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GroupId, "g12"),
        (GroupId, "0000012"),
        (RolloutId, "g0000012"),
        (RolloutId, "g0000012-"),
        (RolloutId, "g0000012-03"),
        (RolloutId, "run.g0000012-3"),
        (RolloutId, "g0000012-filter"),
        (EncodeJobId, "s4f1r0"),
        (EncodeJobId, "s000004f1"),
        (WorkerId, "host"),
    ],
)
def test_a_malformed_id_is_refused_with_an_example_of_a_good_one(kind: Any, text: str) -> None:
    with pytest.raises(MalformedId, match=f"{text!r} is not the id of an? .*, such as "):
        kind.parse(text)


@pytest.mark.parametrize(
    "text", ["", "run", "run.job", "run.job.x", "run.job.1", "run.job.1.", ".job.1.x", "r.j.1.x.y"]
)
def test_a_foreign_field_among_the_leases_matches_nothing(text: str) -> None:
    assert LeaseId.match(text) is None


def test_the_formats_are_those_on_the_wire_and_on_disk() -> None:
    assert str(RolloutId(str(GroupId(12)), 3)) == "g0000012-3"
    assert str(EncodeJobId(4, 1, 0)) == "s000004f1r0"
    assert ids.survey_job(2, "sums") == "e2-sums"
    assert [ids.group_job("g0000012", stage) for stage in ("score", "filter", "advantage")] == [
        "g0000012-score",
        "g0000012-filter",
        "g0000012-advantage",
    ]
    assert str(LeaseId("run", "g0000012-3", 2, "aa")) == "run.g0000012-3.2.aa"
    assert str(LeaseValue("host-7", 4)) == "host-7:4"
    assert str(LeaseValue("host-7", 4, "http://gpu:8000")) == "host-7:4@http://gpu:8000"
    assert WorkerId.of_this_process().pid == os.getpid()
    assert ids.engine_session("g0000012-3", 2) == "g0000012-3.2"
    assert ids.execution_directory("run", "g0000012-3", 2, "aa") == "rollouts/run/g0000012-3/2.aa"


def test_the_ledger_formats_rollout_ids_in_sql_the_same_way() -> None:
    query = f"SELECT {ROLLOUT} FROM (SELECT 'g0000012' AS grp, 3 AS idx) AS rollouts"
    assert sqlite3.connect(":memory:").execute(query).fetchone() == (str(RolloutId("g0000012", 3)),)
    for ordinal in (12, 123_456_789):
        query = f"SELECT {archive.ROLLOUT} FROM (SELECT {ordinal} AS grp, 3 AS idx) AS closed_rollouts"
        rollout = str(RolloutId(str(GroupId(ordinal)), 3))
        assert sqlite3.connect(":memory:").execute(query).fetchone() == (rollout,)


def test_a_file_tells_its_execution() -> None:
    assert ids.execution_of("rollouts/run/g0000012-3/2.aa/columns.safetensors") == (2, "aa")
    for key in ("none", "2.aa/columns", "rollouts/run/g0000012-3/aa/columns", "rollouts/run/g0000012-3/2.aa"):
        assert ids.execution_of(key) is None
    for execution in ("0123456789ab", "000000000000", "aa", "0123456789AB", "+12345678901", "1_2", " 12345678901"):
        assert archive.execution_text(archive.execution_code(execution)) == execution
    assert archive.execution_code("0123456789ab") == 0x0123456789AB
