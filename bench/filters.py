"""`python -m bench filters`: time of the gibberish and repetition filters over a step, against a Python loop.

The loop reads Python lists, as parsed from JSON, which are made before timing starts. Each round it judges another
share of the rollouts and its time is scaled to all of them. The verdicts of both must be equal.
"""

import math
from time import perf_counter

import numpy as np

from bench.harness.report import Report, Target, median
from headpond.filters import (
    FilterSettings,
    Gibberish,
    Mode,
    Overlong,
    Repetition,
    RolloutTokens,
    Stale,
    count_matches,
    judge,
    rollout_filters,
)

ROUNDS = 8
VOCAB_SIZE = 151_936
TURN_TOKENS, CONTEXT_TOKENS = 1_200, 300
"""a turn is 300 tokens of context and 900 sampled tokens; 50 turns are 60,000 tokens"""
FLAWED = 7
"""1 rollout in 7 has an improbable rare token (gibberish), another 1 in 7 a long run of certain ones (repetition)"""
SETTINGS = FilterSettings(overlong=Overlong(mode=Mode.OFF), stale=Stale(mode=Mode.OFF))

Lists = tuple[list[int], list[int], list[float]]
Matches = tuple[int | None, int | None]


def run(*, quick: bool) -> Report:
    rollouts, tokens = (16, 12_000) if quick else (256, 60_000)
    rng = np.random.default_rng(0)
    step = [make_rollout(rng, index, tokens) for index in range(rollouts)]
    filters = rollout_filters(SETTINGS, vocab_size=VOCAB_SIZE)
    loop_s, vectorised_s, verdicts = list[float](), list[float](), []
    for number in range(ROUNDS):
        share = range(number, rollouts, ROUNDS)
        lists = [as_lists(step[index]) for index in share]
        start = perf_counter()
        matches = [find_by_loop(each) for each in lists]
        middle = perf_counter()
        verdicts = [judge(rollout, filters) for rollout in step]
        vectorised_s.append(perf_counter() - middle)
        loop_s.append((middle - start) * rollouts / len(share))
        by_filter = [{match.filter: match.token for match in verdicts[index].matches} for index in share]
        if matches != [(each.get("gibberish"), each.get("repetition")) for each in by_filter]:
            raise AssertionError(f"round {number}: the filters and the loop matched different tokens")
    matched = count_matches(verdicts)
    ratio = median([slow / fast for slow, fast in zip(loop_s, vectorised_s, strict=True)])
    return Report(
        bench="filters",
        figures={
            "rollouts": rollouts,
            "tokens a rollout": tokens,
            "gibberish found": matched["gibberish"],
            "repetition found": matched["repetition"],
            "verdicts compared": rollouts,
            "loop, s a step": median(loop_s),
            "filters, s a step": median(vectorised_s),
            "filters, us a rollout": median(vectorised_s) / rollouts * 1e6,
            "times faster": ratio,
        },
        targets=[Target(name="times faster than the loop", value=ratio, limit=50, sense="at least")],
        rounds=ROUNDS,
        quick=quick,
    )


def make_rollout(rng: np.random.Generator, index: int, tokens: int) -> RolloutTokens:
    """7 of 10 sampled tokens are almost certain, as in reasoning text."""
    certain = rng.random(tokens, dtype=np.float32) < 0.7
    logprobs = np.where(certain, -0.005 * rng.random(tokens), -rng.exponential(1.0, tokens)).astype(np.float32)
    logprobs = np.maximum(logprobs, -np.float32(math.log(VOCAB_SIZE)))
    input_ids = rng.integers(0, VOCAB_SIZE, tokens, dtype=np.int32)
    loss_mask = (np.arange(tokens) % TURN_TOKENS >= CONTEXT_TOKENS).astype(np.uint8)
    place = int(rng.integers(tokens // 8, tokens // 2)) // TURN_TOKENS * TURN_TOKENS
    if index % FLAWED == 1:
        input_ids[place - 1], logprobs[place - 1] = VOCAB_SIZE - 1, -20.0
    elif index % FLAWED == 2:
        logprobs[place : place + 6 * TURN_TOKENS] = -0.001
    logprobs[loss_mask == 0] = 0
    return RolloutTokens(
        input_ids=input_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        sample_offsets=np.array([0, tokens]),
        truncated=np.zeros(1, np.uint8),
        overlong_prompt=np.zeros(1, np.uint8),
        version_first=0,
        version_now=0,
    )


def as_lists(rollout: RolloutTokens) -> Lists:
    return rollout.input_ids.tolist(), rollout.loss_mask.tolist(), rollout.logprobs.tolist()


def find_by_loop(rollout: Lists) -> Matches:
    return find_gibberish(rollout, Gibberish()), find_repetition(rollout, Repetition())


def find_gibberish(rollout: Lists, settings: Gibberish) -> int | None:
    limit = -math.log(VOCAB_SIZE) - settings.logprob_offset
    input_ids, loss_mask, logprobs = rollout
    for token, (input_id, sampled, logprob) in enumerate(zip(input_ids, loss_mask, logprobs, strict=True)):
        if sampled and input_id > settings.token_id_threshold and logprob < limit:
            return token
    return None


def find_repetition(rollout: Lists, settings: Repetition) -> int | None:
    limit, run = math.log(settings.prob_threshold), 0
    _, loss_mask, logprobs = rollout
    for token, (sampled, logprob) in enumerate(zip(loss_mask, logprobs, strict=True)):
        if not sampled:
            continue
        if logprob > limit:
            run += 1
        else:
            run = 0
        if run >= settings.window:
            return token
    return None
