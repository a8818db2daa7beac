"""The load of a server, read from its metrics page (vLLM; SGLang with `--enable-metrics`)."""

import math
from dataclasses import dataclass

METRICS_PATH = "/metrics"
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
CACHE_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions", "sglang:num_retracted_requests_total")
STARTED = "process_start_time_seconds"
FULL_CACHE = 0.95  # used share of the KV cache: the next request waits, or pushes another one out
NAMES = frozenset((*RUNNING, *WAITING, *CACHE_USE, *PREEMPTIONS, STARTED))


@dataclass(frozen=True, kw_only=True)
class Load:
    running: int
    waiting: int  # requests in the server's queue
    cache_use: float  # used share of the KV cache, 0 to 1, of the fullest engine behind the address
    preemptions: int  # requests that were pushed out of the cache since the server started
    # start time of the server's process, by its own clock; another value is another process
    # (SGLang prints none)
    started_at: float | None = None

    @property
    def cache_is_full(self) -> bool:
        return self.cache_use >= FULL_CACHE


def read_load(page: str) -> Load | None:
    """The load on a metrics page; None if the page lacks the queue's length.

    Values with several labels (one per engine) are added.
    """
    sums: dict[str, float] = {}
    fullest = 0.0
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in NAMES:
            continue
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        if name in CACHE_USE:
            fullest = max(fullest, value)
        else:
            sums[name] = sums.get(name, 0.0) + value
    if not any(name in sums for name in WAITING):
        return None

    def total(names: tuple[str, ...]) -> int:
        return next((int(sums[name]) for name in names if name in sums), 0)

    return Load(
        running=total(RUNNING),
        waiting=total(WAITING),
        cache_use=fullest,
        preemptions=total(PREEMPTIONS),
        started_at=sums.get(STARTED),
    )
