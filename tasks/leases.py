"""The leases of a worker process: one field per running execution, renewed by one thread with one command a second.

A lease exists before the body starts and ends after its reply is written. The thread stops renewing when `alive` is
false (an event loop that does not tick), so a wedged worker looks like a dead one. With each renewal it learns whether
the run has ended, also while the worker drains and hears no remote control.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

import redis

from headpond.broker import redis_keys
from headpond.ids import LeaseValue
from headpond.replica_use import URL_CHARACTERS

logger = logging.getLogger("headpond.leases")

RENEW_MOST_S = 1.0
RENEWALS_A_LEASE = 5  # a lease outlives four renewals that fail or are late


class LeaseKeeper:
    def __init__(
        self,
        client: redis.Redis,
        *,
        worker: str,
        lease_s: float,
        alive: Callable[[], bool] = lambda: True,
        blocked_at: Callable[[], str] = lambda: "an unknown place",
        run_ended: Callable[[Collection[str]], None] = lambda leases: None,
    ) -> None:
        """`run_ended` is called on the thread with the leases of a run that has ended. `blocked_at` says where the code
        is while `alive` is false."""
        self._client = client
        self._every_s = min(RENEW_MOST_S, lease_s / RENEWALS_A_LEASE)
        self._worker = worker
        self._alive = alive
        self._blocked_at = blocked_at
        self._run_ended = run_ended
        self._held: dict[str, Sequence[str]] = {}  # lease -> replicas that its execution waits for
        self._renewed: set[str] = set()
        self._beat = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stopped, name="headpond-leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * RENEW_MOST_S)

    def hold(self, lease: str, asked: Sequence[str] = ()) -> str:
        """Renew `lease` from now on. Returns the value that the caller writes first. `asked` may change: replicas that
        the execution waits for."""
        self._held[lease] = asked
        return self._value(asked)

    def drop(self, lease: str) -> None:
        self._held.pop(lease, None)

    def _value(self, asked: Sequence[str]) -> str:
        last = asked[-1:]  # read once: the loop's thread changes it
        return str(LeaseValue(self._worker, self._beat, last[0][:URL_CHARACTERS] if last else None))

    def _renew_until_stopped(self) -> None:
        failing_since: float | None = None
        while not self._stop.wait(self._every_s):
            if not self._alive():
                logger.warning(
                    "action=lease_withheld worker=%s held=%d the event loop is blocked by %s",
                    self._worker, len(self._held), self._blocked_at(),
                )  # fmt: skip
                continue
            try:
                self._renew()
            except (redis.RedisError, OSError) as error:
                if failing_since is None:
                    failing_since = time.monotonic()
                    logger.warning("action=lease_renewal_fails worker=%s error=%s", self._worker, error)
            else:
                if failing_since is not None:
                    logger.info("action=lease_renewal_back after_s=%.1f", time.monotonic() - failing_since)
                failing_since = None
        with contextlib.suppress(redis.RedisError, OSError):  # no renewal follows that would remove them
            if ended := self._renewed - self._held.keys():
                self._client.hdel(redis_keys.LEASES, *ended)

    def _renew(self) -> None:
        """Renew held leases. Those that ended since the last renewal are removed: it may have re-created them."""
        self._beat += 1
        held = dict(self._held)
        ended = self._renewed - held.keys()
        if not held and not ended:
            return
        self._renewed |= held.keys()
        with self._client.pipeline(transaction=True) as pipe:
            if ended:
                pipe.hdel(redis_keys.LEASES, *ended)
            if held:
                pipe.hset(redis_keys.LEASES, mapping={lease: self._value(asked) for lease, asked in held.items()})
                pipe.expire(redis_keys.LEASES, redis_keys.LEASES_TTL_S)
            pipe.get(redis_keys.ENDED)
            *_, ended_run = pipe.execute()
        self._renewed = set(held)
        if ended_run:
            self._run_ended([lease for lease in held if lease.startswith(f"{ended_run.decode()}.")])
