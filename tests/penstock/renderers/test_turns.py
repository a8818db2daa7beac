from pathlib import Path
from typing import Any

import numpy as np
from support.asking import run
from support.tokenizers_dir import tokenizer_dir

from penstock import bytes_chatml
from penstock.renderers import PooledRenderer, Renderer, RendererKey, RendererPools, SaidTurn, TurnTokens
from penstock.renderers.backends import BytesChatml
from penstock.renderers.directory import DirectoryRenderer
from penstock.renderers.turns import turn_tokens

QUESTION: dict[str, Any] = {"role": "user", "content": "12 + 30?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "42"}
KEY = RendererKey(backend="bytes-chatml", model="base")
SAID = TurnTokens(prompt_ids=np.array([1, 2], np.int32), completion_ids=np.array([3], np.int32))


def counting(seen: list[int]) -> RendererPools:
    class Counting(BytesChatml):
        def render(self, messages: Any, **more: Any) -> Any:
            seen.append(len(messages))
            return super().render(messages, **more)

    def build(key: RendererKey) -> Renderer:
        seen.append(0)
        return Counting()

    return RendererPools(build)


def test_turns_that_have_tokens_need_no_renderer() -> None:
    async def main() -> None:
        seen: list[int] = []
        turns = [SaidTurn(messages=[QUESTION], answer=ANSWER, tokens=SAID)] * 3
        assert await PooledRenderer(counting(seen), KEY).tokens(turns) == [SAID] * 3
        assert await PooledRenderer(counting(seen), KEY).tokens([]) == []
        assert seen == []  # not even built

    run(main)


def test_only_turns_without_tokens_are_rendered() -> None:
    async def main() -> None:
        seen: list[int] = []
        silent = SaidTurn(messages=[QUESTION, ANSWER, QUESTION], answer=ANSWER)
        turns = [SaidTurn(messages=[QUESTION], answer=ANSWER, tokens=SAID), silent]
        found = await PooledRenderer(counting(seen), KEY).tokens(turns)
        assert found[0] is SAID
        assert found[1].prompt_ids.tolist() == bytes_chatml.encode(silent.messages).tolist()
        assert bytes_chatml.decode_answer(found[1].completion_ids)["content"].strip() == "42"
        assert seen == [0, 3, 4]

    run(main)


def test_a_prompt_that_is_written_otherwise_than_a_past_turn_is_cut_where_they_part(tmp_path: Path) -> None:
    renderer = DirectoryRenderer(tokenizer_dir(tmp_path / "small"), {"enable_thinking": False})
    tokens = turn_tokens(renderer, SaidTurn(messages=[QUESTION], answer=ANSWER))
    whole = renderer.render([QUESTION, ANSWER], generate=False)
    assert [*tokens.prompt_ids, *tokens.completion_ids] == whole.tolist()
    assert renderer.message(tokens.completion_ids)["content"].strip() == "42"
