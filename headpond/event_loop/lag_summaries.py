"""Summaries of event loop lag in Redis: one key for each process, which expires after its last
publication."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from redis import Redis
    from redis.asyncio import Redis as AsyncRedis

LAG_KEY = "headpond:lag:{process}"
# Three windows of the default length. A process may miss two publications; a dead one disappears
# soon.
LAG_TTL_S = 30


@dataclass(frozen=True, kw_only=True)
class LagSummary:
    """One window. A `cpu_share` near 1 means that the loop itself is busy. A low one means that
    it waits for the GIL or a core."""

    process: str
    samples: int
    window_s: float
    min_s: float
    mean_s: float
    median_s: float
    p90_s: float
    p99_s: float
    max_s: float
    blocked_s: float  # Sum of the lags above BLOCKED_ABOVE_S.
    cpu_share: float  # CPU time of the loop's thread / wall time.
    # Code that blocked the loop -> seconds since the start; filled by a LagTrace.
    blockers: dict[str, float] = field(default_factory=dict[str, float])

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


Publish = Callable[[LagSummary], Awaitable[None]]


def redis_publisher(redis: "AsyncRedis") -> Publish:
    """Return the `publish` argument of LoopLag. Each process has one key, which expires
    LAG_TTL_S after its last publication."""

    async def publish(summary: LagSummary) -> None:
        await redis.set(LAG_KEY.format(process=summary.process), json.dumps(summary.as_dict()), ex=LAG_TTL_S)

    return publish


def read_summaries(redis: "Redis") -> list[LagSummary]:
    """Read the last summary of every process that published within LAG_TTL_S, sorted by name."""
    keys = list(redis.scan_iter(match=LAG_KEY.format(process="*"), count=1000))
    return _parse_all(redis.mget(keys) if keys else [])


async def read_summaries_async(redis: "AsyncRedis") -> list[LagSummary]:
    keys = [key async for key in redis.scan_iter(match=LAG_KEY.format(process="*"), count=1000)]
    return _parse_all(await redis.mget(keys) if keys else [])


def _parse_all(values: Any) -> list[LagSummary]:
    # A key may expire between the scan and the read.
    summaries = [summary for value in values if value is not None and (summary := _parse(value))]
    return sorted(summaries, key=lambda summary: summary.process)


def _parse(value: bytes) -> LagSummary | None:
    """Parse a summary. Return None if a process of another version has written something else."""
    try:
        return LagSummary.from_dict(json.loads(value))
    except (ValueError, TypeError, KeyError):
        return None
