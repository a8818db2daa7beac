from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tokenizer_directory import tokenizer_dir
from tokenizers import Tokenizer

from penstock.errors import BadRequest, ConfigError
from penstock.renderers import NextTurn, RendererKey, next_prompt
from penstock.renderers.backends import build
from penstock.renderers.directory import DirectoryRenderer
from penstock.renderers.package import PackageRenderer
from penstock.turn import Ids

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
QUESTION: dict[str, Any] = {"role": "user", "content": "What is 12 + 30?"}
RESULT: dict[str, Any] = {"role": "tool", "content": "42"}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_dir(tmp_path_factory.mktemp("tokenizers") / "small")


@pytest.fixture(scope="module")
def renderer(directory: Path) -> PackageRenderer:
    return PackageRenderer(directory, {"name": "qwen3"}, {})


def ids_of(directory: Path, text: str) -> Ids:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def text_of(directory: Path, ids: Ids) -> str:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).decode(ids.tolist(), skip_special_tokens=False)


def test_a_family_is_rendered_by_the_package(directory: Path, renderer: PackageRenderer) -> None:
    assert renderer.render([QUESTION]).tolist() == DirectoryRenderer(directory, {}).render([QUESTION]).tolist()
    assert "# Tools" in text_of(directory, renderer.render([QUESTION], tools=TOOLS))


def test_a_bridge_keeps_every_token(directory: Path, renderer: PackageRenderer) -> None:
    prompt_ids, said = renderer.render([QUESTION], tools=TOOLS), ids_of(directory, f"{CALLED}<|im_end|>")
    ids = renderer.bridge(prompt_ids, said, [RESULT], tools=TOOLS)
    assert ids is not None
    assert ids[: len(prompt_ids) + len(said)].tolist() == [*prompt_ids, *said]
    assert text_of(directory, ids[len(prompt_ids) + len(said) :]).startswith("\n<|im_start|>user\n<tool_response>\n42")


def test_where_the_package_gives_no_bridge_everything_is_rendered_again(
    directory: Path, renderer: PackageRenderer
) -> None:
    """A new question ends what Qwen's template keeps of thoughts, unless the package is told to keep all."""
    messages = [QUESTION, {"role": "assistant", "content": "42"}, {"role": "user", "content": "Sure?"}]
    prompt_ids, said = renderer.render(messages[:1]), ids_of(directory, "<think>\nhm\n</think>\n\n42<|im_end|>")
    turn = NextTurn(messages=messages, prompt_ids=prompt_ids, completion_ids=said, appended=1)
    assert next_prompt(renderer, turn).tolist() == renderer.render(messages).tolist()
    keeping = PackageRenderer(directory, {"name": "qwen3", "thinking_retention": "all"}, {})
    assert next_prompt(keeping, turn)[: len(prompt_ids) + len(said)].tolist() == [*prompt_ids, *said]


def test_an_answer_is_read(directory: Path, renderer: PackageRenderer) -> None:
    def said(text: str) -> dict[str, Any]:
        return renderer.message(ids_of(directory, text), prompt_ids=renderer.render([QUESTION]), tools=TOOLS)

    assert said("Yes.<|im_end|>") == {"role": "assistant", "content": "Yes."}
    assert said("<think>\nhm\n</think>\n\nYes.<|im_end|>")["reasoning_content"].strip() == "hm"
    called = said(f"{CALLED}<|im_end|>")
    assert called["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}
    ]
    assert "add(1)" in said("<tool_call>\nadd(1)\n</tool_call><|im_end|>")["content"]


def test_template_arguments_reach_the_package(directory: Path) -> None:
    thoughtless = PackageRenderer(directory, {"name": "qwen3"}, {"enable_thinking": False})
    assert text_of(directory, thoughtless.render([QUESTION])).endswith("<think>\n\n</think>\n\n")


def test_the_packages_default_is_the_directorys_template(directory: Path) -> None:
    default = PackageRenderer(directory, {"name": "default"}, {})
    assert default.render([QUESTION]).tolist() == DirectoryRenderer(directory, {}).render([QUESTION]).tolist()


def test_it_lives_in_a_process_like_the_others(directory: Path, renderer: PackageRenderer) -> None:
    there = build(RendererKey(backend="renderers", model=str(directory), options='{"name": "qwen3"}'))
    assert there.render([QUESTION]).tolist() == renderer.render([QUESTION]).tolist()


def test_what_is_wrong_is_said(directory: Path, renderer: PackageRenderer) -> None:
    with pytest.raises(ConfigError, match=r"policy\.renderer\.options needs the name of one of"):
        PackageRenderer(directory, {}, {})
    with pytest.raises(ConfigError, match=r"policy\.renderer\.options: the package does not take them"):
        PackageRenderer(directory, {"name": "qwen3", "colour": 3}, {})
    with pytest.raises(ConfigError, match=r"the renderer llama-3 does not fit"):
        PackageRenderer(directory, {"name": "llama-3"}, {})
    with pytest.raises(ConfigError, match=r"the renderer qwen3 does not fit .* Unsupported chat_template_kwargs"):
        PackageRenderer(directory, {"name": "qwen3"}, {"colour": 3})
    with pytest.raises(BadRequest, match="does not take these messages"):
        renderer.render([])
