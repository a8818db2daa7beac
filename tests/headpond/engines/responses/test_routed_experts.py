"""Routed rows are placed by absolute position, only the wanted ones are decoded, and zero rows are marked invalid."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_responses import routed

from headpond.engines.responses.routed_experts import (
    SAMPLED_ROWS,
    Wanted,
    WireObject,
    read_object,
    read_string,
)
from headpond.errors import Upstream
from headpond.turn import CheckRoutes, RouteFormat, Routes, Rows

ROWS = np.random.default_rng(3).integers(1, 200, (30, 3, 5)).astype(np.uint16)


def wanted(tokens: int, first: int = 0, requested_from: int = 0) -> Wanted:
    return Wanted(tokens=tokens, first=first, until=tokens, requested_from=requested_from)


def read(form: str, rows: Rows, wish: Wanted, route_format: RouteFormat, start: int = 0) -> Routes | None:
    payload = routed(rows, form, start)
    if form == "object":
        wire = WireObject(data=b"", shape=payload["shape"], start=payload.get("start"), dtype=payload.get("dtype"))  # pyright: ignore
        return read_object(wire, payload["data"].encode(), wish, route_format)
    return read_string(payload.encode(), wish, route_format)


@pytest.mark.parametrize("form", ["object", "npy", "bare"])
@settings(max_examples=100)
@given(data=st.data())
def test_rows_are_read_from_the_first_wanted_one(form: str, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(2, 30), "tokens")
    start = data.draw(st.sampled_from([0, *range(2, tokens)]), "start")  # 1 and a surplus row would look like 0
    surplus = data.draw(st.booleans(), "a row for the last token as well")
    first = data.draw(st.integers(0, tokens), "first")
    sent = ROWS[start : tokens if surplus else tokens - 1]
    route_format = RouteFormat(layers=3, topk=5, check=CheckRoutes.OFF)
    routes = read(form, sent, wanted(tokens, first, requested_from=start), route_format, start)
    if max(first, start) >= start + len(sent):
        assert routes is None
    else:
        assert routes is not None
        assert routes.first == max(first, start)
        assert np.array_equal(routes.rows, ROWS[routes.first : start + len(sent)])
        assert routes.rows.flags.aligned


@pytest.mark.parametrize(
    ("wire", "experts", "kept"),
    [
        ("uint8", None, "uint8"),
        ("uint8", 128, "uint8"),
        ("uint16", None, "uint16"),
        ("uint16", 256, "uint8"),
        ("uint16", 257, "uint16"),
        ("int32", None, "uint16"),
        ("int32", 200, "uint8"),
        ("int64", 512, "uint16"),
    ],
)
def test_ids_are_kept_in_the_narrowest_type_that_holds_every_expert(wire: str, experts: int | None, kept: str) -> None:
    rows = ROWS.clip(0, 127).astype(wire)
    routes = read("npy", rows, wanted(31), RouteFormat(experts=experts))
    assert routes is not None
    assert routes.rows.dtype == kept
    assert np.array_equal(routes.rows, rows)


@pytest.mark.parametrize(("wire", "experts", "bad"), [("int32", None, 65536), ("int32", None, -1), ("uint8", 128, 128)])
def test_an_expert_id_out_of_range_is_rejected(wire: str, experts: int | None, bad: int) -> None:
    rows = ROWS.clip(0, 127).astype(wire)
    rows[7, 1, 2] = bad
    with pytest.raises(Upstream, match="below 0 or above"):
        read("npy", rows, wanted(31), RouteFormat(experts=experts))
    assert read("npy", rows, wanted(31, first=8), RouteFormat(experts=experts)) is not None, (
        "recorded rows are not checked"
    )


def test_a_bare_string_has_the_configured_shape_or_is_refused() -> None:
    routes = read("bare", ROWS, wanted(31), RouteFormat(layers=3, topk=5))
    assert routes is not None
    assert routes.format.row_bytes == 3 * 5 * 4
    with pytest.raises(Upstream, match=r"int32 .*4 layers and 5 experts"):
        read("bare", ROWS, wanted(31), RouteFormat(layers=4, topk=5))
    with pytest.raises(Upstream, match=r"engine\.experts_per_token"):
        read("bare", ROWS, wanted(31), RouteFormat(layers=3))


def test_later_rows_must_have_the_format_of_the_first() -> None:
    first = read("npy", ROWS, wanted(31), RouteFormat())
    assert first is not None
    for other in (ROWS[:, :2], ROWS[:, :, :4], ROWS.astype(np.uint8)):
        with pytest.raises(Upstream, match="configured or came before"):
            read("npy", other, wanted(31), first.format)


def test_an_engine_may_obey_or_ignore_the_requested_start() -> None:
    for form in ("npy", "bare"):
        obeyed = read(form, ROWS[10:], wanted(31, first=12, requested_from=10), RouteFormat(layers=3, topk=5))
        ignored = read(form, ROWS, wanted(31, first=12, requested_from=10), RouteFormat(layers=3, topk=5))
        for routes in (obeyed, ignored):
            assert routes is not None
            assert routes.first == 12
            assert np.array_equal(routes.rows, ROWS[12:])


class TestZeroRows:
    """A row of zeros means that nothing was captured, unless there is one expert per token."""

    many = np.ones((100 * SAMPLED_ROWS, 2, 2), np.uint8)

    def read(self, rows: Rows, check: CheckRoutes) -> Routes | None:
        return read("npy", rows, wanted(len(rows) + 1), RouteFormat(check=check))

    def test_a_payload_of_zeros_has_no_rows(self) -> None:
        for check in (CheckRoutes.SAMPLE, CheckRoutes.ALL):
            assert self.read(np.zeros_like(self.many), check) is None
        assert self.read(np.zeros_like(self.many), CheckRoutes.OFF) is not None

    @pytest.mark.parametrize("check", [CheckRoutes.SAMPLE, CheckRoutes.ALL])
    @pytest.mark.parametrize("zeros", [slice(0, 100), slice(-1, None), slice(777, 900)])
    def test_runs_of_zeros_and_a_zero_last_row_are_marked_invalid(self, check: CheckRoutes, zeros: slice) -> None:
        rows = self.many.copy()
        rows[zeros] = 0
        routes = self.read(rows, check)
        assert routes is not None
        assert routes.valid is not None
        assert np.array_equal(routes.valid, rows.any(axis=(1, 2)))

    def test_a_sample_may_miss_a_single_row(self) -> None:
        rows = self.many.copy()
        rows[3] = 0
        sampled, all_of_them = self.read(rows, CheckRoutes.SAMPLE), self.read(rows, CheckRoutes.ALL)
        assert sampled is not None
        assert sampled.valid is None
        assert all_of_them is not None
        assert all_of_them.valid is not None

    def test_zeros_are_valid_with_one_expert_per_token(self) -> None:
        routes = self.read(np.zeros((5, 2, 1), np.uint8), CheckRoutes.ALL)
        assert routes is not None
        assert routes.valid is None


def test_npy_headers_of_all_versions_are_read() -> None:
    for version in ((1, 0), (2, 0), (3, 0)):
        data = npy(ROWS, version)
        routes = read_string(base64.b64encode(data), wanted(31, first=5), RouteFormat())
        assert routes is not None
        assert np.array_equal(routes.rows, ROWS[5:])


def npy(rows: Rows, version: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, rows, version=version)
    return file.getvalue()
