"""Simulated workers: they take messages from the queues, hold leases, write real files, run the real stages, reply.

What they say to Redis is written by the code of real workers: `Execution`, `write_lease`, `write_reply`, `Presence`.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import xxhash
from redis.exceptions import RedisError

from headpond import ids
from headpond.broker import redis_keys
from headpond.broker.queues import WorkerKind
from headpond.config import RunConfig
from headpond.errors import EngineUnreachable, InfrastructureFailure
from headpond.event_loop.offload import in_io_thread
from headpond.records.inputs import GroupInputs
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef, Store, open_store
from headpond.store.columns import Columns, TurnTable, write_columns
from headpond.store.experts import Chunk, seal_experts
from headpond.tasks import agreement, inputs
from headpond.tasks.agreement import Order, Presence
from headpond.tasks.execution import EncodedReply, Execution, write_lease, write_reply
from headpond.tasks.stage import Message, all_stages
from headpond.tasks.stages.filter import FilterResult
from headpond.tasks.stages.play import PlayMessage
from headpond.tasks.stages.score import ScoreResult
from headpond.tasks.stages.survey import SurveyResult
from simulation.disk import kill_this_process
from simulation.redis_stand_in import Client

if TYPE_CHECKING:
    from simulation.world import World

EXAMPLES = 50
MOST_TOKENS = 250  # 31 s of 40; a worker that is slow for a time may need more
STAGES = {stage.task: stage for stage in all_stages().values()}
MOMENTS = ("taken", "leased", "files", "replied")
"""where an armed worker dies: before its lease, after it, after its files, after its reply"""
WORDS = {"finish_reason": ["stop"], "agent": [""], "engine": [""], "sampling": ["{}"]}


@dataclass(kw_only=True)
class Behaviour:
    """What is wrong with one worker, or with all of them."""

    fails: bool = False
    engine_away: bool = False
    dies_at: str | None = None
    repeats_replies: bool = False
    late_s: float = 0.0
    """its replies come this much later, without a lease"""
    slow: float = 1.0
    drops_everything: bool = False
    encodes_nothing: bool = False


class SimulatedWorker:
    def __init__(self, world: "World", kind: WorkerKind, number: int) -> None:
        self.world = world
        self.kind = kind
        self.config: RunConfig = world.config
        self.process = world.new_process(f"{kind}-{number}")
        self.name = str(ids.WorkerId(f"host{number}", number))
        self.node = f"{kind}-{number}@sim"
        self.behaviour = Behaviour()
        self.stopping = False
        self._random = world.random(f"worker {self.node}")
        settings = agreement.digest(agreement.used_settings(self.config, kind))
        self._identity = agreement.Identity(node=self.node, settings=settings)
        self._client = Client(world.redis)
        self._store = open_store(self.config.store_url)
        self._held: set[str] = set()
        self._renewed: set[str] = set()
        self._beat = 0
        self._slots: int | None = 0
        self._refused: str | None = None
        self.running: dict[str, asyncio.Task[Any]] = {}
        """task id -> its execution"""

    def start(self) -> None:
        self.world.live(self.process, self._live())

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._be_there())
            group.create_task(self._renew())
            await self._consume(group)

    async def _persistent(self, call: Callable[[], Any]) -> Any:
        """Repeated until Redis accepts it."""
        while True:
            try:
                async with asyncio.timeout(5.0):
                    return await call()
            except (RedisError, OSError):
                await asyncio.sleep(0.5)

    async def _be_there(self) -> None:
        """As `headpond.workers.admission.Admission`."""
        while True:
            try:
                async with asyncio.timeout(5.0):
                    await self._ask()
            except (RedisError, OSError):
                pass
            await asyncio.sleep(1.0)

    async def _ask(self) -> None:
        self._beat += 1
        presence = Presence(
            kind=self.kind, pid=1, settings=self._identity.settings, beat=self._beat, running=len(self.running),
            refused=self._refused,
        )  # fmt: skip
        async with self._client.pipeline() as pipe:
            pipe.hset(redis_keys.WORKERS, self.node, presence.model_dump_json())
            pipe.expire(redis_keys.WORKERS, redis_keys.WORKERS_TTL_S)
            pipe.hget(redis_keys.RUN_SETTINGS, self.kind.value)
            pipe.hget(redis_keys.ORDERS, self.node)
            *_, run_settings, order = await pipe.execute()
        matches = run_settings is None or run_settings.decode() == self._identity.settings
        self._refused = None if matches else "its settings are not the run's"
        self._slots = 0 if self._refused else Order.model_validate_json(order).slots if order else None

    async def _renew(self) -> None:
        """As `headpond.tasks.leases.LeaseKeeper`."""
        while True:
            await asyncio.sleep(min(1.0, self.config.recovery.lease_s / 5))
            held = set(self._held)
            ended = self._renewed - held
            if not held and not ended:
                continue
            self._renewed |= held
            try:
                async with asyncio.timeout(5.0), self._client.pipeline() as pipe:
                    if ended:
                        pipe.hdel(redis_keys.LEASES, *sorted(ended))
                    if held:
                        pipe.hset(redis_keys.LEASES, mapping=dict.fromkeys(sorted(held), self._lease_value()))
                        pipe.expire(redis_keys.LEASES, redis_keys.LEASES_TTL_S)
                    await pipe.execute()
                self._renewed = held
            except (RedisError, OSError):
                pass

    def _lease_value(self) -> str:
        self._beat += 1
        return str(ids.LeaseValue(self.name, self._beat))

    async def _consume(self, group: asyncio.TaskGroup) -> None:
        most = 4 if self.kind is WorkerKind.ROLLOUTS else 2
        while not self.stopping or self.running:
            slots = min(most, self._slots) if self._slots is not None else most
            if self.stopping or len(self.running) >= slots:
                await asyncio.sleep(0.2)
            elif message := await self._pop():
                self._at("taken")
                group.create_task(self._execute(message))
                await asyncio.sleep(0)
        self.process.kill()

    async def _pop(self) -> bytes | None:
        try:
            async with asyncio.timeout(5.0):
                found = await self._client.brpop(list(self.kind.queues), timeout=1.0)
            return found[1] if found else None
        except (RedisError, OSError):
            await asyncio.sleep(0.5)
            return None

    def _at(self, moment: str) -> None:
        if self.behaviour.dies_at == moment:
            self.world.note(f"{self.node} dies at {moment}")
            self.world.replace_worker(self)
            kill_this_process()

    async def _execute(self, message: bytes) -> None:
        """As `headpond.tasks.execution.AsyncExecutor.execute`."""
        try:
            content = orjson.loads(message)
            headers = content["headers"]
            stage = STAGES[headers["task"]]
            job: Message = stage.message.model_validate(orjson.loads(content["body"])[0][0])
        except (ValueError, KeyError):
            return  # as Celery: a message that it cannot read is discarded
        if headers["id"] in self.world.revoked:
            return  # as Celery: a revoked task is discarded
        execution = Execution(stage=stage, job=job, worker=self.name, identity=self._identity, started=time.monotonic())
        agreement.headers.set(headers)
        task = asyncio.current_task()
        assert task is not None
        self.running[headers["id"]] = task
        try:
            reply = execution.declined() or await self._reply_of(execution)
            await self._send(execution, reply)
        finally:
            self._held.discard(execution.lease)
            self.running.pop(headers["id"], None)
        self._at("replied")

    async def _reply_of(self, execution: Execution) -> EncodedReply:
        self._held.add(execution.lease)
        value = self._lease_value()
        await self._persistent(lambda: self._write(lambda pipe: write_lease(pipe, execution.lease, value)))
        self._at("leased")
        try:
            async with asyncio.timeout(execution.job.timeout_s + 20):
                result = await self._body(execution)
            reply = execution.done(result)
        except asyncio.CancelledError as error:
            reply = execution.failed(error, released=True)
        except Exception as error:  # noqa: BLE001  as real workers: any error becomes the reply
            reply = execution.failed(execution.timed_out() if isinstance(error, TimeoutError) else error)
        self._at("files")
        return reply

    async def _send(self, execution: Execution, reply: EncodedReply) -> None:
        if self.behaviour.late_s:
            self._held.discard(execution.lease)
            await asyncio.sleep(self._random.uniform(0, self.behaviour.late_s))
        for _ in range(2 if self.behaviour.repeats_replies else 1):
            await self._persistent(lambda: self._write(lambda pipe: write_reply(pipe, execution, reply.content)))
            self.world.replies_sent.append(reply.content)

    async def _write(self, write: Callable[[Any], tuple[str, int]]) -> None:
        async with self._client.pipeline() as pipe:
            pipe.expire(*write(pipe))
            await pipe.execute()

    # bodies

    async def _body(self, execution: Execution) -> Any:
        if self.behaviour.fails:
            raise InfrastructureFailure("this worker fails every job (simulated)")
        if isinstance(execution.job, PlayMessage):
            return await self._play(execution.job, execution.id)
        await asyncio.sleep(self.behaviour.slow * self._random.uniform(0.01, 0.4))
        return await in_io_thread(self._compute, execution)

    def _compute(self, execution: Execution) -> Any:
        name, call = execution.stage.name, execution.call(self.config)
        if name == "survey":
            scores = call.message.environment in self.world.scoring
            return SurveyResult(examples=EXAMPLES, scores_groups=scores)
        if name == "score":
            group = inputs.read(self._store, call.message.plan, GroupInputs)
            return ScoreResult(rewards={rollout: result.reward for rollout, result in group.members.items()})
        if name == "encode" and self.behaviour.encodes_nothing:
            raise InfrastructureFailure("this worker encodes nothing (simulated)")
        result = execution.stage.body(call)
        if name == "filter" and self.behaviour.drops_everything:
            group = inputs.read(self._store, call.message.plan, GroupInputs)
            return FilterResult(dropped=dict.fromkeys(group.members, "simulated"))
        return result

    async def _play(self, job: PlayMessage, execution: str) -> RolloutResult:
        if self.behaviour.engine_away:
            await asyncio.sleep(0.1)
            raise EngineUnreachable("the engine is away (simulated)")
        version = self.world.policy_version
        tokens = length_of(self.world.seed, job.job)
        # A hung rollout is over its time-out.
        hangs = chance(self.world.seed, job.job, job.attempt, "hangs") < self.world.hang_rate
        await asyncio.sleep(self.behaviour.slow * (10_000 if hangs else 0.1 + tokens / 8))
        if chance(self.world.seed, job.job, "policy") < 0.03:
            return RolloutResult(reward=0.0, policy_error="simulated", version_first=-1)
        directory = ids.execution_directory(job.run, job.job, job.attempt, execution)
        columns, experts = await in_io_thread(self._write_files, directory, job, tokens, version)
        return RolloutResult(
            reward=reward_of(self.world.seed, job.job),
            columns=columns,
            experts=experts,
            sample_lengths=(tokens + 2,),
            version_first=version,
            version_last=version,
            turns=1,
            prompt_tokens=2,
            completion_tokens=tokens,
        )

    def _write_files(
        self, directory: str, job: PlayMessage, tokens: int, version: int
    ) -> tuple[BlobRef, BlobRef | None]:
        metrics = {
            "example": float(job.example),
            "environment": float(sorted(self.config.environments).index(job.environment)),
        }
        columns = columns_of(job, tokens, version, self.world.numbers, metrics)
        experts = None
        if self.world.routed_experts:
            experts = experts_of(self._store, f"{directory}/experts.safetensors", job, tokens + 2)
        return write_columns(self._store, f"{directory}/columns.safetensors", columns), experts


def chance(seed: int, *parts: object) -> float:
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode(), seed=seed) / 2**64


def length_of(seed: int, rollout: str) -> int:
    """Completion tokens of a rollout; its duration is proportional, and within its time-out."""
    return min(MOST_TOKENS, 1 + int(4 * math.exp(1.2 * Random(f"{seed}/{rollout}").gauss(0, 1))))


def reward_of(seed: int, rollout: str) -> float:
    return round(chance(seed, rollout, "reward"), 6)


def columns_of(
    job: PlayMessage, tokens: int, version: int, numbers: np.random.Generator, metrics: dict[str, float]
) -> Columns:
    def turn(dtype: str, value: float) -> np.ndarray[Any, Any]:
        return np.array([value], dtype)

    length = tokens + 2
    return Columns(
        rollout=job.job,
        attempt=job.attempt,
        logprobs_mode="processed",
        input_ids=numbers.integers(2, 1000, length).astype(np.int32),
        loss_mask=np.array([0, 0] + [1] * tokens, np.uint8),
        logprobs=np.array([0, 0] + [-0.5] * tokens, np.float32),
        sample_offsets=np.array([0, length], np.int64),
        first_prompt_length=np.array([2], np.int32),
        truncated=np.zeros(1, np.uint8),
        overlong_prompt=np.zeros(1, np.uint8),
        turns=TurnTable(
            sample=turn("i4", 0), start=turn("i8", 2), end=turn("i8", length), version_first=turn("i4", version),
            version_last=turn("i4", version), version_exact=turn("u1", 1), temperature=turn("f4", 1.0),
            reward=turn("f8", 0.0),
            **{name: turn("i4", 0) for name in WORDS}, words=WORDS,
        ),
        metrics=metrics,
        conversation=np.frombuffer(b"[]", np.uint8),
    )  # fmt: skip


def experts_of(store: Store, key: str, job: PlayMessage, length: int) -> BlobRef:
    part = store.part(key, reserve_head=True)
    part.append(np.ones((length - 1, 1, 2), np.uint8))
    return seal_experts(
        store, key, part, chunks=[Chunk(sample=0, first=0, rows=length - 1)],
        routed_valid=np.array([1] * (length - 1) + [0], np.uint8), row=(1, 2), dtype=np.dtype("u1"),
        rollout=job.job, attempt=job.attempt,
    )  # fmt: skip
