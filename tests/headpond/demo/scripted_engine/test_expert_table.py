"""Routed experts from a table: a token has the same row in every request and every form."""

import json
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headpond.demo.scripted_engine.expert_table import BLOCK, ExpertTable
from headpond.demo.scripted_engine.options import ExpertForm, ExpertShape
from headpond.engines.responses.routed_experts import WIRE_OBJECT, Wanted, read_object, read_string
from headpond.turn import CheckRoutes, RouteFormat, Routes

TABLE = ExpertTable(ExpertShape(layers=3, topk=2, experts=16))


def ids(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 258, tokens, dtype=np.int32)


def read(table: ExpertTable, form: ExpertForm, tokens: np.ndarray, first: int) -> Routes | None:
    """As a client reads what was sent."""
    text = b"".join(table.encoded(form, tokens, first))
    json.loads(text)
    shape = table.shape
    known = RouteFormat(layers=shape.layers, topk=shape.topk, experts=shape.experts, check=CheckRoutes.ALL)
    wanted = Wanted(tokens=len(tokens), first=first, until=len(tokens), requested_from=first)
    if form == "object":
        wire = WIRE_OBJECT.decode(text)
        return read_object(wire, bytes(wire.data)[1:-1], wanted, known)
    return read_string(text[1:-1], wanted, known)


# Rows of 1, 2, 3, 4 and 5 bytes: base64 begins at every place of its three bytes.
TABLES = [ExpertTable(ExpertShape(layers=1, topk=topk, experts=16)) for topk in (1, 2, 4, 5)]
TABLES += [TABLE, ExpertTable(ExpertShape(layers=1, topk=3, experts=300))]


@settings(max_examples=200)
@given(st.data(), st.sampled_from(get_args(ExpertForm)), st.sampled_from(TABLES))
def test_any_range_of_rows_is_read_back_in_any_form(data: st.DataObject, form: ExpertForm, table: ExpertTable) -> None:
    tokens = ids(data.draw(st.integers(2, 3 * BLOCK + 2)))
    first = data.draw(st.integers(0, len(tokens) - 2))
    routes, expected = read(table, form, tokens, first), table.rows(tokens, first)
    assert len(expected) == len(tokens) - 1 - first
    assert np.array_equal(expected, table.rows(tokens)[first:])
    assert routes is not None
    assert routes.first == first
    assert routes.valid is None
    assert np.array_equal(routes.rows, expected)


def test_a_single_token_has_no_row() -> None:
    assert TABLE.rows(ids(1)).shape == (0, 3, 2)
    assert b"".join(TABLE.encoded("object", ids(1))) == b'{"data":"","shape":[0,3,2],"start":0,"dtype":"uint8"}'


def test_rows_of_a_prefix_do_not_change_when_the_sequence_grows() -> None:
    longer = ids(1000)
    for tokens in (1, 2, BLOCK, BLOCK + 1, BLOCK + 2, 500):
        assert np.array_equal(TABLE.rows(longer[:tokens]), TABLE.rows(longer)[: tokens - 1])


def test_diverging_sequences_have_different_rows_from_the_next_block_on() -> None:
    one, other = ids(3 * BLOCK), ids(3 * BLOCK)
    other[BLOCK + 5] += 1
    rows, other_rows = TABLE.rows(one), TABLE.rows(other)
    assert np.array_equal(rows[: 2 * BLOCK], other_rows[: 2 * BLOCK])
    assert (rows[2 * BLOCK :] != other_rows[2 * BLOCK :]).any(axis=(1, 2)).mean() > 0.9


def test_the_table_is_the_same_in_every_engine() -> None:
    assert np.array_equal(ExpertTable(TABLE.shape).rows(ids(400)), TABLE.rows(ids(400)))


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_expert_ids_use_the_narrowest_type(experts: int, dtype: type) -> None:
    rows = ExpertTable(ExpertShape(layers=2, topk=4, experts=experts)).rows(ids(3000))
    assert rows.dtype == dtype
    assert rows.min() > 0, "a row of zeros would say that nothing was captured"
    assert rows.max() == experts - 1
