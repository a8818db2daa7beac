"""What is answered: a pure function of the prompt's tokens, the request's seed and the engine's settings."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.renderers import bytes_chatml
from penstock.renderers.bytes_chatml import Message
from penstock.turn import Ids
from services.engine.draws import Draws
from services.engine.players import Said, play
from services.engine.requests import Asked
from services.engine.settings import EngineSettings

WORDS = ["so", "we", "look", "at", "what", "is", "left", "of", "it", "once", "more", "and", "take", "the", "next"]
THOUGHTS = bytes_chatml.encode_text(" ".join(WORDS[place * place % 89 % len(WORDS)] for place in range(1_000)))
"""What a policy says before its answer: as long as it is told to be, beginning at some place."""

LOGPROB_LEVELS = [-float(f"{level:.6f}") for level in np.geomspace(1e-4, 8, 32)]


@dataclass(frozen=True, kw_only=True)
class Answer:
    id: str
    completion_ids: Ids
    levels: NDArray[np.int64]
    """of each token, which of LOGPROB_LEVELS it has"""
    message: Message
    finish_reason: str
    latency_s: float

    @property
    def cut(self) -> bool:
        return self.finish_reason == "length"


def draws_of(asked: Asked, settings: EngineSettings, session: bytes) -> Draws:
    """Without a seed in the request, its session stands for chance: rollouts of one example then differ."""
    chance = session if asked.seed is None else b"seed %d" % asked.seed
    return Draws(asked.prompt_ids.tobytes(), chance, b"%d" % settings.seed)


def answer_to(asked: Asked, draws: Draws, settings: EngineSettings) -> Answer:
    room = settings.max_model_len - len(asked.prompt_ids)
    if room < 1:
        limit, tokens = settings.max_model_len, len(asked.prompt_ids)
        raise BadRequest(f"this model's maximum context length is {limit} tokens; the prompt alone has {tokens}")
    said = play(bytes_chatml.decode_messages(asked.prompt_ids), draws, settings.skill) or Said(text="")
    spoken = bytes_chatml.encode_completion({"content": said.text, "tool_calls": said.calls})
    length = max(round(settings.completion_tokens.at(draws.uniform("length"))), len(spoken))
    limit = min(room, asked.max_tokens or room)
    place = draws.integer("thoughts", 0, len(THOUGHTS) - 1)
    thoughts = np.resize(THOUGHTS[place:], min(limit, length - len(spoken)))
    ids = np.concatenate([thoughts, spoken])[:limit]
    message = bytes_chatml.decode_completion(ids)
    return Answer(
        id=f"{draws.seed:016x}",
        completion_ids=ids,
        levels=_levels(len(ids), draws),
        message=message,
        finish_reason="length" if length > limit else "tool_calls" if message.get("tool_calls") else "stop",
        latency_s=settings.latency_s.at(draws.uniform("latency")),
    )


def _levels(tokens: int, draws: Draws) -> NDArray[np.int64]:
    """Most tokens are nearly certain, some are not."""
    places = np.arange(tokens, dtype=np.uint64) + np.uint64(draws.seed >> 1)
    return (places * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(59)).astype(np.int64)
