"""The replicas of a server: their load, the label of their weights, and which of them may serve.

The version before a request comes from the last finished poll. The version after it comes from the
first poll that began once the response had come. `control.EngineControl` polls.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from headpond.engines.replicas.load import Load
from headpond.engines.weights import START_VERSION, WeightLabel
from headpond.errors import EngineUnreachable
from headpond.replica_use import ASKED
from headpond.turn import SaidVersion

# An unreachable replica is the last choice for this long. A restart takes longer. Then one request
# at a time shows whether the replica is back.
AVOIDED_S = 5.0
# Labels kept of a replica, one for each change: more updates than a rollout can see.
LABELS_KEPT = 1024
# A poll takes milliseconds; while weights are loaded, vLLM answers none.
FIRST_POLL_S = 5.0
AFTER_POLL_S = 30.0
GIVE_UP_POLLS = 10  # failed in a row: the replica is gone, and will not report the version that it sampled with
# Returns to an earlier version among this many polls: several servers answer at one address. One server that restarts
# twice needs longer.
ROUTER_RETURNS, ROUTER_POLLS = 2, 20
PROCESSES_KEPT = 64  # more servers than stand behind one address
# A queued request counts as several running ones: it waits until one of them ends. So a large replica that runs all its
# requests is chosen before a small one with a queue.
QUEUED_WEIGHT = 5


# Awaited before a request is sent on a new connection.
CONNECTED = ContextVar[Callable[[], Awaitable[None]] | None]("CONNECTED", default=None)


@dataclass(frozen=True, kw_only=True)
class Orders:
    """A run's requirements for its replicas. Jobs carry them; the newest ones apply to the whole
    process."""

    run: str = ""
    sequence: int = 0  # Sequence number of the job.
    version: int = START_VERSION  # The newest that was published.
    # Replicas with older weights serve nothing that is trained on.
    least_version: int = START_VERSION
    # Replicas with these versions serve nothing either: the trainer has resumed from an older
    # checkpoint.
    abandoned: tuple[int, ...] = ()


NO_ORDERS = Orders()


@dataclass(kw_only=True)
class Answers:
    """Consecutive polls with the same answer."""

    label: WeightLabel | None  # The label; None if the server reports none.
    last_began: float


@dataclass(kw_only=True, eq=False)
class Replica:
    url: str
    in_flight: int = 0  # Requests of this process.
    load: Load | None = None  # Load from the replica's last /metrics response, or None.
    _in_flight_at_look: int = 0
    # Start times of the processes that answered at this address, the latest last.
    _processes: deque[float] = field(default_factory=lambda: deque[float](maxlen=PROCESSES_KEPT))
    unreachable_at: float = -math.inf  # When a connection last failed, by the monotonic clock.
    answers: deque[Answers] = field(default_factory=lambda: deque[Answers](maxlen=LABELS_KEPT))
    asked: asyncio.Event = field(default_factory=asyncio.Event)  # Set to poll at once.
    failed_polls: int = 0  # Polls that failed since the last success.
    # When a poll or a connection last failed: the server may have restarted since, with other
    # weights.
    doubted_at: float = -math.inf
    # Whether its last response named the request that it answers (`transport.RequestNames`).
    names_requests: bool = False
    # Whether several servers answer at this address. One server's report is then invalid for
    # the next request.
    router: bool = False
    _polled: asyncio.Event = field(default_factory=asyncio.Event)  # Set by the next poll.
    _polls: int = 0
    _highest: int = START_VERSION
    _returns: deque[int] = field(default_factory=lambda: deque[int](maxlen=ROUTER_RETURNS))

    @property
    def avoided(self) -> bool:
        return time.monotonic() - self.unreachable_at < AVOIDED_S

    def mark_unreachable(self) -> None:
        self.unreachable_at = time.monotonic()
        self.doubt()

    def doubt(self) -> None:
        """Invalidate the last label: the next request polls first."""
        self.doubted_at = time.monotonic()

    @property
    def doubted(self) -> bool:
        """Whether no poll that began after the last failure has succeeded."""
        return not self.answers or self.answers[-1].last_began <= self.doubted_at

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """Count one request in flight."""
        self.in_flight += 1
        urls = ASKED.get()
        if urls is not None:
            urls.append(self.url)
        try:
            yield
        finally:
            self.in_flight -= 1
            if urls is not None:
                urls.remove(self.url)

    def hear_load(self, load: Load | None) -> None:
        self.load, self._in_flight_at_look = load, self.in_flight
        if load and load.started_at is not None:
            self._record_process(load.started_at)

    def _record_process(self, started_at: float) -> None:
        """Record the process that answers. If an earlier one answers again, several servers share
        the address.

        A server that restarts never returns as the same process.
        """
        if self._processes and self._processes[-1] == started_at:
            return
        self.router = self.router or started_at in self._processes
        self._processes.append(started_at)

    @property
    def busyness(self) -> tuple[bool, int]:
        """A key that grows with the load: whether the cache is full, then the number of requests.

        The requests include those of other processes. Requests that this process sent since the
        last look are added.
        """
        if self.load is None:
            return False, self.in_flight
        since = self.in_flight - self._in_flight_at_look
        requests = self.load.running + QUEUED_WEIGHT * self.load.waiting + since
        return self.load.cache_is_full, max(self.in_flight, requests)

    @property
    def label(self) -> WeightLabel | None:
        """The label in the last finished poll; None if there is none."""
        return self.answers[-1].label if self.answers else None

    def hear(self, label: WeightLabel | None, *, began: float) -> None:
        """Record the label of a finished poll that began at `began`."""
        self._polls += 1
        self.failed_polls = 0
        last = self.answers[-1] if self.answers else None
        if last and last.label == label:
            last.last_began = began
        else:
            self._watch_for_router(label)
            self.answers.append(Answers(label=label, last_began=began))
        self._end_poll()

    def poll_failed(self) -> None:
        """Record a poll that failed: the replica may be restarting."""
        self.failed_polls += 1
        self.doubt()
        self._returns.clear()
        self._end_poll()

    async def polled(self, *, within_s: float) -> None:
        """Poll at once, and wait until the poll has ended, with any result."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                self.asked.set()
                await self._polled.wait()

    def _end_poll(self) -> None:
        polled, self._polled = self._polled, asyncio.Event()
        polled.set()

    async def said_after(self, at: float, *, within_s: float) -> WeightLabel | None:
        """The label in the first poll that began after `at`; None if none ends in time, or if it
        has no label."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    answer = next((answer for answer in self.answers if answer.last_began > at), None)
                    if answer and not (answer.label and answer.label.unfit == "loading"):
                        return answer.label
                    if answer:  # between two versions: the next one decides
                        at = answer.last_began
                        continue
                    if self.failed_polls >= GIVE_UP_POLLS:
                        break
                    self.asked.set()
                    await self._polled.wait()
        return None

    def why_refused(self, orders: Orders) -> str | None:
        """The reason why the replica serves nothing that is trained on; None if it may serve.

        Workers pass a job's orders, the run passes its own.
        """
        label = self.label
        if not self.answers:
            return None
        if label is None:
            return f"{self.url} does not say which weights it has" if orders.least_version > START_VERSION else None
        if label.unfit:
            return f"{self.url} calls its weights {label.text!r}: they were not loaded completely"
        if label.run is not None and orders.run and label.run != orders.run:
            return f"{self.url} calls its weights {label.text!r}: another run has loaded them"
        if label.numbered and label.version in orders.abandoned:
            return f"{self.url} calls its weights {label.text!r}, which the trainer has abandoned"
        if label.version < orders.least_version:
            return f"{self.url} calls its weights {label.text!r}, older than version {orders.least_version}"
        if label.version < min(self._highest, orders.version) and not self.router:
            return f"{self.url} has gone back from version {self._highest} to {label.text!r}: it has restarted"
        return None

    def _watch_for_router(self, label: WeightLabel | None) -> None:
        if label is None or label.unfit:  # an update: not one server beside another
            self._returns.clear()
            return
        version, previous = label.version, self.label
        updated = previous is None or previous.unfit
        if not updated and version >= self._highest and any(entry.label == label for entry in self.answers):
            self._returns.append(self._polls)
            recent = self._polls - self._returns[0] <= ROUTER_POLLS
            self.router = self.router or (len(self._returns) == ROUTER_RETURNS and recent)
        self._highest = max(self._highest, version)


class Asked:
    """A replica's version before a request. The transport polls again if the request gets a new
    connection.

    Another process may have started at the address since the last poll, with other weights. A
    reused connection leads to the process that was polled then.
    """

    def __init__(self, replicas: "Replicas", replica: Replica, version: SaidVersion) -> None:
        self._replicas = replicas
        self._replica = replica
        self.version = version

    @contextlib.contextmanager
    def sending(self) -> Generator[None]:
        token = CONNECTED.set(self._connected)
        try:
            yield
        finally:
            CONNECTED.reset(token)

    async def _connected(self) -> None:
        self.version = await self._replicas.version_now(self._replica)


class Replicas:
    def __init__(self, urls: Sequence[str], *, reported: bool = False, lora: bool = False) -> None:
        """`reported`: replicas are polled for their versions. `lora`: each request names the
        version."""
        self.lora = lora
        self.all = [Replica(url=url) for url in urls]
        self.orders = NO_ORDERS
        self._reported = reported
        self._ordered_at = -math.inf

    @property
    def all_avoided(self) -> bool:
        return all(replica.avoided for replica in self.all)

    @property
    def all_refused(self) -> bool:
        return all(self.refusal(replica) for replica in self.all)

    def choose(self, preferred: Replica | None = None, *, failed: Replica | None = None) -> Replica:
        """`preferred`, whose prefix cache has the conversation, unless it is refused, avoided, or
        has just failed.

        Otherwise the least busy replica is chosen, round robin among equals.
        """
        if preferred and preferred is not failed and not preferred.avoided and not self.refusal(preferred):
            return preferred
        chosen = min(
            self.all,
            key=lambda replica: (
                self.refusal(replica) is not None,
                replica.avoided,
                replica is failed,
                replica.busyness,
            ),
        )
        self.all.remove(chosen)
        self.all.append(chosen)
        return chosen

    def refusal(self, replica: Replica) -> str | None:
        return replica.why_refused(self.orders) if self._reported else None

    def follow(self, orders: Orders) -> None:
        """Take over the orders of a job. Older orders of the same run change nothing: jobs may
        arrive in any order."""
        current = self.orders
        if orders.run == current.run and orders.sequence < current.sequence:
            return
        if (orders.run, orders.version) != (current.run, current.version):
            self._ordered_at = time.monotonic()
        self.orders = orders

    async def ask(self, replica: Replica) -> Asked:
        """The replica's version before a request, polled if need be. EngineUnreachable if it may
        not serve."""
        return Asked(self, replica, self._unless_refused(replica, await self.before(replica)))

    async def before(self, replica: Replica) -> SaidVersion:
        """The replica's version before a request. It is polled first if no poll succeeded since the
        last failure.

        A replica with an old version is also polled, unless a poll began after the orders' version
        arrived.
        """
        for _ in range(2):  # the poll under way may have begun before the orders came
            if not self._reported or not self._must_ask(replica):
                break
            await replica.polled(within_s=FIRST_POLL_S)
        return self._last_version(replica)

    async def version_now(self, replica: Replica) -> SaidVersion:
        """The replica's version from a poll that begins now. EngineUnreachable if the replica may
        not serve."""
        called_at = time.monotonic()
        for _ in range(2):  # the poll under way began before
            if not self._reported or (replica.answers and replica.answers[-1].last_began >= called_at):
                break
            await replica.polled(within_s=FIRST_POLL_S)
        return self._unless_refused(replica, self._last_version(replica, since=called_at))

    def _last_version(self, replica: Replica, *, since: float = -math.inf) -> SaidVersion:
        """The version in the last poll. It is not exact if it may be outdated, or is older than
        `since`."""
        if not self._reported:
            return SaidVersion(self.orders.version, exact=False)
        last = self._version_of(replica, replica.label)
        holds = not replica.doubted and replica.answers[-1].last_began >= since
        return SaidVersion(last.version, exact=last.exact and holds)

    def _unless_refused(self, replica: Replica, version: SaidVersion) -> SaidVersion:
        if refusal := self.refusal(replica):
            raise EngineUnreachable(refusal)
        return version

    async def adapter(self) -> WeightLabel | None:
        """The newest LoRA adapter that every serving replica has; None before the first, or without
        LoRA."""
        if not self.lora:
            return None
        for replica in self.all:
            await self.before(replica)
        serving = [replica.label for replica in self.all if replica.label and not self.refusal(replica)]
        label = min(serving, key=lambda label: label.version, default=None)
        return label if label and label.numbered else None

    def has_loaded(self, label: WeightLabel) -> bool:
        """Whether the adapter belongs to the run, is loaded completely, and was not abandoned by
        the trainer."""
        of_run = label.run is not None and label.run == (self.orders.run or label.run)
        return of_run and not label.unfit and label.version not in self.orders.abandoned

    def _must_ask(self, replica: Replica) -> bool:
        if replica.doubted:
            return True
        last = replica.answers[-1]
        is_behind = last.label is None or last.label.version < self.orders.version
        return is_behind and last.last_began < self._ordered_at

    def answered_at(self) -> float | None:
        """`TurnMetadata.answered_at` for a response that has just come."""
        return time.monotonic() if self._reported else None

    async def after(self, url: str, version_before: int, answered_at: float) -> SaidVersion | None:
        """The replica's version after the response of a turn; None if it is unknown.

        EngineUnreachable if the replica has restarted since, or its weights were not loaded
        completely. The turn cannot be trained on.
        """
        replica = next((replica for replica in self.all if replica.url == url), None)
        if replica is None:
            return None
        # The clock of another start of the machine may be ahead of ours.
        at = min(answered_at, time.monotonic())
        label = await replica.said_after(at, within_s=AFTER_POLL_S)
        if label is None:
            return None
        if label.unfit or (label.version < version_before and not replica.router):
            raise EngineUnreachable(
                f"{url} went from version {version_before} to weights that it calls {label.text!r} while it served the "
                "rollout: it has restarted, or an update failed"
            )
        return self._version_of(replica, label)

    def _version_of(self, replica: Replica, label: WeightLabel | None) -> SaidVersion:
        """The version of a label. A label without a number is exact only while nothing was
        published: a trainer may update without naming."""
        if label is None:
            return SaidVersion(START_VERSION, exact=False)
        is_exact = label.numbered or self.orders.version == START_VERSION
        return SaidVersion(label.version, exact=is_exact and not label.unfit and not replica.router)
