"""Whatever the order of commits, failures and kills, what is sealed follows from the requests in their order."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.agent_scenarios import Sent, assert_sealed, plain_turns, recorded, scenarios
from support.plain_samples import merge
from support.stores import directory_store

from headpond.records.rollout import Recorded


@settings(max_examples=60)
@given(
    requests=scenarios(),
    orders=st.lists(st.lists(st.integers(0, 5), max_size=24), min_size=2, max_size=2),
    killed_after=st.integers(0, 20),
)
def test_any_order_of_commits_seals_what_the_requests_say(
    requests: list[Sent], orders: list[list[int]], killed_after: int
) -> None:
    expected, _ = merge(plain_turns(requests))
    sealed: list[Recorded] = []
    for killed, choices in zip((-1, killed_after), orders, strict=True):
        with tempfile.TemporaryDirectory() as root:
            store = directory_store(Path(root))
            sealed.append(asyncio.run(recorded(store, requests, choices, killed)))
            assert_sealed(store, sealed[-1], expected)
    assert sealed[0].columns.checksum == sealed[1].columns.checksum
    assert sealed[0].metrics == sealed[1].metrics
