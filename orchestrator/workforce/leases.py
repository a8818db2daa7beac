"""The leases of running executions in Redis, which workers renew: read and removed in slices."""

from typing import Any

from headpond.broker import redis_keys
from headpond.orchestrator.duties.slices import in_slices
from headpond.orchestrator.exchange.redis_connection import Broker

LEASES_AT_ONCE = 500  # about 1 ms


async def read_leases(broker: Broker) -> dict[str, str]:
    """Lease -> value, of every execution. In slices: one that begins or ends meanwhile may be missing or not."""
    leases: dict[str, str] = {}
    cursor = 0
    while True:
        read: Any = await broker.call(
            lambda client, cursor=cursor: client.hscan(redis_keys.LEASES, cursor, count=LEASES_AT_ONCE)
        )
        cursor, some = read
        leases |= {lease.decode(): value.decode() for lease, value in some.items()}
        if not cursor:
            return leases


async def remove_leases(broker: Broker, leases: list[str]) -> None:
    async for some in in_slices(leases, LEASES_AT_ONCE):
        await broker.call(lambda client, some=some: client.hdel(redis_keys.LEASES, *some))
