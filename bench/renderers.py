"""`python -m bench renderers`: loop gap while a tokenizer is built, and memory of adapters that share one.

First callers: 64 requests at once need a renderer that is not built yet, with a tokenizer that takes about 200 ms; the
baseline builds it on the loop. Adapters: 8 adapters send 64 requests each in their own process, against one adapter's
64; memory is what the process and its renderers retain. Every pool has one renderer.
"""

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness.canary import INTERVAL_S, WINDOW_S, Canary
from bench.harness.procfs import proportional_mib
from bench.harness.progress import progress
from bench.harness.report import Report, Target, median
from headpond.config.engine import RendererSettings
from headpond.event_loop.factory import event_loop_factory
from headpond.event_loop.loop_lag import LoopLag
from headpond.renderers import NextTurn, PooledRenderer, Renderer
from headpond.renderers.pools import build

ROUNDS, MEMORY_ROUNDS = 15, 5  # a maximum varies more than other figures, hence more rounds
CALLERS, ADAPTERS = 64, 8
QUIET_S = 0.1  # before and after the measured calls, so that a gap at either end is counted
MERGES = 60_000  # loaded in 200 ms on an idle core
TURN = NextTurn(messages=[{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 8}])
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True, kw_only=True)
class FirstCallers:
    gap_ms: float
    canary_ms: float
    builds: int


@dataclass(frozen=True, kw_only=True)
class Retained:
    pools: int
    mib: float


def run(*, quick: bool) -> Report:
    rounds, merges, adapters = (1, 1_000, 2) if quick else (ROUNDS, MERGES, ADAPTERS)
    ours: list[FirstCallers] = []
    baseline: list[FirstCallers] = []
    memory: dict[str, list[Retained]] = {"one": [], "pinned": [], "unpinned": []}
    with progress("renderers") as show, Canary() as canary, tempfile.TemporaryDirectory() as made:
        directory = write_tokenizer(Path(made), merges)
        for number in range(1, rounds + 1):
            show(f"first callers, round {number} of {rounds}")
            baseline.append(measured(canary, lambda: on_loop(directory)))
            ours.append(measured(canary, lambda: pooled(directory)))
        for number in range(1, min(rounds, MEMORY_ROUNDS) + 1):
            show(f"adapters, round {number}")
            memory["one"].append(retained(directory, 1, pinned=True))
            memory["pinned"].append(retained(directory, adapters, pinned=True))
        memory["unpinned"].append(retained(directory, adapters, pinned=False))
    return _report(ours, baseline, memory, adapters=adapters, quick=quick)


def measured(canary: Canary, callers: Callable[[], Awaitable[int]]) -> FirstCallers:
    async def main() -> FirstCallers:
        lag = LoopLag(process="bench", interval_s=INTERVAL_S, window_s=WINDOW_S)
        canary.begin()
        sampling = asyncio.create_task(lag.run())
        await asyncio.sleep(QUIET_S)
        builds = await callers()
        await asyncio.sleep(QUIET_S)
        sampling.cancel()
        gap_s, canary_s = lag.summary().max_s, canary.end().max_s
        return FirstCallers(gap_ms=1000 * gap_s, canary_ms=1000 * canary_s, builds=builds)

    gc.collect()
    with asyncio.Runner(loop_factory=event_loop_factory(concurrency=CALLERS)) as runner:
        return runner.run(main())


async def pooled(directory: Path) -> int:
    """First callers of a pooled renderer."""
    builds = 0

    def counted() -> Renderer:
        nonlocal builds
        builds += 1
        return build(RendererSettings(backend="directory"), str(directory))

    renderer = PooledRenderer(counted, max_renderers=1)
    await asyncio.gather(*(renderer.prompt_ids(TURN) for _ in range(CALLERS)))
    return builds


async def on_loop(directory: Path) -> int:
    """The baseline: the first caller builds the renderer on the loop, the others reuse it."""
    from headpond.renderers.tokenizer_directory import DirectoryRenderer

    built: list[DirectoryRenderer] = []

    async def caller() -> None:
        if not built:
            built.append(DirectoryRenderer(directory, {}))
        await asyncio.sleep(0)
        built[0].render(TURN.messages)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return len(built)


def retained(directory: Path, adapters: int, *, pinned: bool) -> Retained:
    arguments = [str(directory), str(adapters), "pinned" if pinned else "unpinned"]
    done = subprocess.run([sys.executable, "-m", "bench.renderers", *arguments], check=True, stdout=subprocess.PIPE)
    return Retained(**json.loads(done.stdout))


async def play_adapters(directory: Path, adapters: int, *, pinned: bool) -> Retained:
    """Send requests of `adapters` adapters: over the process's renderer, or over one for each of their names."""
    settings = RendererSettings(model=str(directory) if pinned else None)
    models = [f"{directory}{'/.' * number}" for number in range(1 if pinned else adapters)]
    before = proportional_mib(os.getpid())
    renderers = [PooledRenderer(partial(build, settings, model), max_renderers=1) for model in models]
    for number in range(adapters):
        renderer = renderers[number % len(renderers)]
        await asyncio.gather(*(renderer.prompt_ids(TURN) for _ in range(CALLERS)))
    gc.collect()
    return Retained(pools=len(renderers), mib=proportional_mib(os.getpid()) - before)


def write_tokenizer(directory: Path, merges: int) -> Path:
    """Byte-level BPE with random merges, as large and as slow to load as a real one of that size."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    draws = random.Random(0)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, made = {token: number for number, token in enumerate(tokens)}, list[tuple[str, str]]()
    while len(made) < merges:
        left, right = draws.choice(tokens), draws.choice(tokens)
        if len(left + right) <= 14 and left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            tokens.append(left + right)
            made.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=made))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def _report(
    ours: list[FirstCallers],
    baseline: list[FirstCallers],
    memory: dict[str, list[Retained]],
    *,
    adapters: int,
    quick: bool,
) -> Report:
    above_ms = median([each.gap_ms - each.canary_ms for each in ours])
    share = median([one.gap_ms / other.gap_ms for one, other in zip(ours, baseline, strict=True)])
    mib = {name: median([each.mib for each in rounds]) for name, rounds in memory.items()}
    ratio = median([many.mib / one.mib for many, one in zip(memory["pinned"], memory["one"], strict=True)])
    pools = {name: max(each.pools for each in rounds) for name, rounds in memory.items()}
    builds = max(each.builds for each in ours)
    figures = {
        "first callers": CALLERS,
        "max gap, ms": median([each.gap_ms for each in ours]),
        "canary max gap, ms": median([each.canary_ms for each in ours]),
        "on the loop: max gap, ms": median([each.gap_ms for each in baseline]),
        "builds": builds,
        "adapters": adapters,
        "pools, pinned": pools["pinned"],
        "pools, unpinned": pools["unpinned"],
        "one adapter, MiB": mib["one"],
        "pinned, MiB": mib["pinned"],
        "unpinned, MiB": mib["unpinned"],
    }
    targets = [
        Target(name="max gap above canary's, ms", value=above_ms, limit=5),
        Target(name="max gap / on the loop", value=share, limit=1 / 20),
        Target(name="builds for the first callers", value=builds, limit=1),
        Target(name="pools of pinned adapters", value=pools["pinned"], limit=1),
        Target(name="memory of pinned adapters / of one", value=ratio, limit=1.05),
    ]
    return Report(bench="renderers", figures=figures, targets=targets, rounds=len(ours), quick=quick)


if __name__ == "__main__":
    where, number, pin = sys.argv[1:]
    with asyncio.Runner(loop_factory=event_loop_factory(concurrency=CALLERS)) as runner:
        retained_memory = runner.run(play_adapters(Path(where), int(number), pinned=pin == "pinned"))
    sys.stdout.write(json.dumps({"pools": retained_memory.pools, "mib": retained_memory.mib}))
