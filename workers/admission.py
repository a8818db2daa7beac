"""Decides whether this worker may take jobs: it reports to Redis once a second, and reads the answer.

It takes none while its settings are not the run's, none in quarantine, and one at a time on trial. Without an
orchestrator there is no answer, and it takes what is queued; `headpond.tasks.agreement` then decides for each message.
"""

import logging
import threading
from types import MethodType
from typing import Any

import orjson
import redis
from celery import bootsteps
from celery.worker import state
from celery.worker.consumer.tasks import Tasks
from redis.backoff import NoBackoff
from redis.retry import Retry

from headpond.broker import redis_keys
from headpond.broker.queues import WorkerKind
from headpond.config import RunConfig
from headpond.errors import shortened
from headpond.tasks import jobs
from headpond.tasks.agreement import NODE_CHARACTERS, RESTART, Order, Presence, differences, digest, used_settings
from headpond.tasks.celery_app import settings

logger = logging.getLogger("headpond.worker")

EVERY_S = 1.0
TIMEOUT_S = 5.0  # Redis responds within milliseconds; a longer silence is a dead connection
SHOWN_CHARACTERS = 400


class Admission:
    def __init__(self, config: RunConfig, kind: WorkerKind, node: str) -> None:
        self._kind = kind
        self._node = node[:NODE_CHARACTERS]
        self._settings = used_settings(config, kind)
        self._digest = digest(self._settings)
        self._client = redis.Redis.from_url(
            config.redis_url, socket_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), retries=0)
        )
        self._beat = 0
        self._refused: str | None = None
        self._ordered: Order | None = None
        # jobs that it may run at once, None for as many as its pool; none until the first
        # answer
        self.slots: int | None = 0
        self._thread = threading.Thread(target=self._ask_until_the_end, name="headpond-admission", daemon=True)

    def start(self) -> None:
        """Ask once, then every second."""
        self._ask_or_log()
        self._thread.start()

    def _ask_until_the_end(self) -> None:
        pause = threading.Event()
        while not pause.wait(EVERY_S):
            self._ask_or_log()

    def _ask_or_log(self) -> None:
        """An answer that does not come leaves everything as it is."""
        try:
            self._ask()
        except (redis.RedisError, OSError) as error:
            logger.warning("action=admission_waits worker=%s error=%s", self._node, error)

    def _ask(self) -> None:
        self._beat += 1
        presence = Presence(
            kind=self._kind, settings=self._digest, beat=self._beat, running=len(state.reserved_requests),
            refused=self._refused, **_blocked(),
        )  # fmt: skip
        with self._client.pipeline(transaction=True) as pipe:
            pipe.hset(redis_keys.WORKERS, self._node, presence.model_dump_json(exclude_none=True))
            pipe.expire(redis_keys.WORKERS, redis_keys.WORKERS_TTL_S)
            pipe.hget(redis_keys.RUN_SETTINGS, self._kind.value)
            pipe.hget(redis_keys.ORDERS, self._node)
            *_, run_digest, order = pipe.execute()
        self._compare(run_digest)
        self._obey(Order.model_validate_json(order) if order else None)
        self.slots = 0 if self._refused else self._ordered.slots if self._ordered else None

    def _compare(self, run_digest: bytes | None) -> None:
        if run_digest is None or run_digest.decode() == self._digest:
            if self._refused:
                logger.warning("action=accepted worker=%s its settings are those of the run", self._node)
            self._refused = None
            return
        content: Any = self._client.hget(redis_keys.RUN_SETTINGS, f"{self._kind}:values")
        refused = shortened(differences(orjson.loads(content or "{}"), self._settings), SHOWN_CHARACTERS)
        if refused != self._refused:
            logger.error("action=refused worker=%s it takes no jobs: %s. %s", self._node, refused, RESTART)
        self._refused = refused

    def _obey(self, order: Order | None) -> None:
        before = self._ordered.slots if self._ordered else None
        now = order.slots if order else None
        self._ordered = order
        if now != before and order is None:
            logger.warning("action=admitted worker=%s it takes jobs again", self._node)
        elif now != before and order is not None:
            what = "quarantined" if order.slots == 0 else "trial"
            logger.error(
                "action=%s worker=%s jobs fail here while they succeed on other workers, the last with: %s",
                what, self._node, order.why,
            )  # fmt: skip


def _blocked() -> dict[str, Any]:
    """Return the report of a rollout worker whose event loop is blocked: it is present, and does not work."""
    executor = jobs.executor
    if executor is None or executor.ticks():
        return {}
    return {"blocked_s": round(executor.silent_s(), 1), "blocked_at": executor.blocked_at()}


class AdmissionStep(bootsteps.StartStopStep):
    """Stands between Celery's consumer and the queues. Celery starts it again after every reconnection."""

    requires = (Tasks,)
    admission: Admission | None = None
    kind: WorkerKind

    def start(self, parent: Any) -> None:
        if AdmissionStep.admission is None:
            AdmissionStep.admission = Admission(settings(), self.kind, parent.hostname)
            AdmissionStep.admission.start()
        admission = AdmissionStep.admission
        channel = parent.task_consumer.channel
        qos, may_take = channel.qos, channel.qos.can_consume

        def can_consume(_: object) -> bool:
            """kombu asks before it waits for a message, and again before it reads the one that has come: that one has
            left the queue, so it is read (`headpond.tasks.agreement` may decline it)."""
            if channel._in_poll:
                return True
            if admission.slots is not None and len(state.reserved_requests) >= admission.slots:
                return False
            return may_take()

        qos.can_consume = MethodType(can_consume, qos)
