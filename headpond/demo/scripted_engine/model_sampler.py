"""Completions sampled from a model: all requests in flight together, one token each in every forward pass.

A pass runs in a thread. The loop decides before each pass which weights it has and which requests take part, so every
token has the version of one state of the weights, also when they change in the middle of a completion.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headpond.demo import tiny_moe
from headpond.demo.scripted_engine.completion_requests import CompletionRequest
from headpond.demo.scripted_engine.draws import Draws
from headpond.demo.scripted_engine.expert_table import SampledRows
from headpond.demo.scripted_engine.generation import Alter, Generation, Sampled, room_for
from headpond.demo.scripted_engine.options import EngineSettings
from headpond.demo.scripted_engine.served_weights import Flight, State, TokenSpan, Weights
from headpond.errors import BadRequest, StageError
from headpond.renderers import bytes_chatml
from headpond.turn import Ids

# Windows of one forward pass. Its arrays take about 5 kB a row. Longer prompts are cut into several passes.
PASS_ROWS = 4096
# Room for the tokens of a completion, doubled when it is full.
FIRST_ROOM = 64
Array = NDArray[Any]

logger = logging.getLogger("headpond.engine")


class TokenStream:
    """A completion that is being sampled. The loop and the thread use it in turns: never while a pass is awaited."""

    def __init__(self, request: CompletionRequest, draws: Draws, flight: Flight, limit: int) -> None:
        self.flight = flight
        self.temperature = 1.0 if request.temperature is None else request.temperature
        self.top_k = request.top_k if request.top_k and request.top_k > 0 else tiny_moe.VOCABULARY
        self.done = asyncio.Event()
        self.failed = False
        self._draws, self._limit = draws, limit
        self._prompt = len(request.prompt_ids)
        room = np.empty(min(limit, FIRST_ROOM), np.int32)
        # The model's windows are views of it.
        self._tokens = np.concatenate([np.full(tiny_moe.WINDOW, tiny_moe.BEFORE, np.int32), request.prompt_ids, room])
        self._length = self._prompt
        self.rows_from = min(request.experts_from if request.routed_experts else self._prompt, self._prompt - 1)
        self._rows: list[Array] = []
        self._routed = self.rows_from  # tokens whose row is known
        self.logprobs: list[float] = []
        self.drawn_from: list[Ids] = []
        self.states: list[State] = []  # state of the weights for each token

    @property
    def ids(self) -> Ids:
        return self._tokens[tiny_moe.WINDOW + self._prompt : tiny_moe.WINDOW + self._length]

    @property
    def rows(self) -> Array:
        return np.concatenate(self._rows) if self._rows else np.empty((0, tiny_moe.LAYERS, tiny_moe.TOPK), np.uint8)

    @property
    def ended(self) -> bool:
        return len(self.ids) == self._limit or (len(self.ids) > 0 and self.ids[-1] == tiny_moe.MESSAGE_END)

    @property
    def unread(self) -> int:
        """Tokens without a row."""
        return self._length - self._routed

    def windows(self, most: int) -> Array:
        """Return up to `most` windows of tokens without a row. After the last token, the next one can be sampled."""
        known = self._tokens[: tiny_moe.WINDOW + self._length]
        views = np.lib.stride_tricks.sliding_window_view(known, tiny_moe.WINDOW)
        return views[self._routed + 1 :][:most]

    def uniform(self) -> float:
        """A continued completion draws as one in a piece."""
        return self._draws.uniform(f"token {self._length}")

    def add_rows(self, rows: Array) -> None:
        self._rows.append(rows)
        self._routed += len(rows)

    def add_token(self, token: int, logprob: float, drawn_from: Ids, state: State) -> None:
        if tiny_moe.WINDOW + self._length == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[tiny_moe.WINDOW + self._length] = token
        self._length += 1
        self.logprobs.append(logprob)
        self.drawn_from.append(drawn_from)
        self.states.append(state)


class ModelSampler:
    def __init__(self, settings: EngineSettings, weights: Weights) -> None:
        self._settings = settings
        self._weights = weights
        self._streams: dict[TokenStream, None] = {}  # streams in the order of their arrival
        self._thread = ThreadPoolExecutor(1, "forward-pass")
        self._decoding: asyncio.Task[None] | None = None

    async def sample(self, request: CompletionRequest, draws: Draws, flight: Flight, alter: Alter) -> Sampled:
        room = room_for(request, self._settings)
        if request.prompt_ids.max() >= tiny_moe.VOCABULARY:
            raise BadRequest(
                f"the prompt has token {request.prompt_ids.max()}; the vocabulary has {tiny_moe.VOCABULARY}"
            )
        stream = TokenStream(request, draws, flight, min(room, request.max_tokens or room))
        self._streams[stream] = None
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode())
            self._decoding.add_done_callback(self._decoded)
        try:
            await stream.done.wait()
        finally:
            self._streams.pop(stream, None)
        if stream.failed:
            raise StageError("the forward pass failed: the engine's log has the error")
        generation = alter(_generation(stream, draws))
        spans = _spans(stream.states[: len(generation.completion_ids)], self._weights.state)
        rows = SampledRows(stream.rows, stream.rows_from, self._settings.routed_experts.form)
        return Sampled(generation=generation, spans=spans, experts=rows)

    async def _decode(self) -> None:
        """Run passes until no completion is left."""
        while self._streams:
            for stream in [each for each in self._streams if each.flight.aborted or each.ended]:
                self._streams.pop(stream)
                stream.done.set()
            if self._streams and await self._weights.until_running():
                await self._pass()

    def _decoded(self, task: "asyncio.Task[None]") -> None:
        """Called later than the task's end: streams may have begun since, which another task serves."""
        if task.cancelled() or not (error := task.exception()):
            return
        logger.error("action=forward_pass_failed", exc_info=error)
        for stream in self._streams:
            stream.failed = True
            stream.done.set()

    async def _pass(self) -> None:
        """One token for each completion whose prompt has been read; PASS_ROWS at most."""
        model, state = self._weights.model, self._weights.state
        assert model is not None
        chosen: dict[TokenStream, int] = {}
        left = PASS_ROWS
        for stream in self._streams:
            if left:
                chosen[stream] = min(left, stream.unread)
                left -= chosen[stream]
        raw = self._settings.logprobs_mode == "raw_logprobs"
        await asyncio.get_running_loop().run_in_executor(self._thread, sample_next, model, state, chosen, raw)


def sample_next(model: tiny_moe.Weights, state: State, rows: Mapping[TokenStream, int], raw: bool) -> None:
    """Reads some tokens of each stream; of one that is read to its end, the next token is sampled."""
    windows = [stream.windows(count) for stream, count in rows.items()]
    temperatures = np.array([stream.temperature for stream in rows])
    top_k = np.array([stream.top_k for stream in rows])
    uniforms = np.array([stream.uniform() for stream in rows])
    passed = next_tokens(model, windows, temperatures, uniforms, raw, top_k)
    for stream, routes, token, logprob, drawn_from in zip(rows, *passed, strict=True):
        stream.add_rows(routes)
        if not stream.unread:
            stream.add_token(token, logprob, drawn_from, state)


def next_tokens(
    model: tiny_moe.Weights,
    windows: Sequence[Array],
    temperatures: Array,
    uniforms: Array,
    raw: bool,
    top_k: Array | int = tiny_moe.VOCABULARY,
) -> tuple[list[Array], list[int], list[float], list[Ids]]:
    """Rows of each stream's windows, and the token after the last one with its logprob and, with a top_k, the tokens
    that it was drawn from."""
    ends = np.cumsum([len(each) for each in windows])
    passed = tiny_moe.forward(model, np.concatenate(windows))
    logits = tiny_moe.logits(model, passed.hidden[ends - 1]).astype(np.float64)
    scaled = logits / np.where(temperatures > 0, temperatures, 1.0)[:, None]
    drawn_from = [np.empty(0, np.int32)] * len(windows)
    if np.min(top_k) < tiny_moe.VOCABULARY:
        ranks = (-logits).argsort(axis=1).argsort(axis=1)
        left = ranks < np.broadcast_to(top_k, len(windows))[:, None]
        scaled = np.where(left, scaled, -np.inf)
        drawn_from = [np.flatnonzero(each).astype(np.int32) for each in left]
    scaled = tiny_moe.log_softmax(scaled)
    shares = np.exp(scaled).cumsum(axis=1)
    # The last share may be below 1 by rounding.
    drawn = (shares < uniforms[:, None] * shares[:, -1:]).sum(axis=1)
    tokens = np.where(temperatures > 0, drawn, logits.argmax(axis=1))
    logprobs = np.take_along_axis(tiny_moe.log_softmax(logits) if raw else scaled, tokens[:, None], axis=1)[:, 0]
    return np.split(passed.routes, ends[:-1]), tokens.tolist(), logprobs.tolist(), drawn_from


def _generation(stream: TokenStream, draws: Draws) -> Generation:
    message = bytes_chatml.decode_completion(stream.ids)
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    if not stream.ended:
        reason = "abort"
    elif stream.ids[-1] != tiny_moe.MESSAGE_END:
        reason = "length"
    return Generation(
        id=f"{draws.seed:016x}",
        completion_ids=stream.ids.copy(),
        levels=np.zeros(len(stream.ids), np.int64),
        logprobs=np.array(stream.logprobs),
        sampling_mask=stream.drawn_from if stream.top_k < tiny_moe.VOCABULARY else None,
        message=message,
        finish_reason=reason,
        latency_s=0.0,
    )


def _spans(states: Sequence[State], now: State) -> list[TokenSpan]:
    spans: list[TokenSpan] = []
    for state, tokens in groupby(states):
        start = spans[-1].end if spans else 0
        spans.append(TokenSpan(state, start, start + len(list(tokens))))
    return spans or [TokenSpan(now, 0, 0)]
