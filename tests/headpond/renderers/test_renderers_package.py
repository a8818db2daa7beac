from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tokenizer_directory import tokenizer_dir
from tokenizers import Tokenizer

from headpond.config.engine import RendererSettings
from headpond.errors import BadRequest, ConfigError
from headpond.renderers import NextTurn, next_prompt
from headpond.renderers.pools import build
from headpond.renderers.renderers_package import PackageRenderer
from headpond.renderers.tokenizer_directory import DirectoryRenderer
from headpond.turn import Ids

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


def test_a_model_family_is_rendered_by_the_package(directory: Path, renderer: PackageRenderer) -> None:
    assert renderer.render([QUESTION]).tolist() == DirectoryRenderer(directory, {}).render([QUESTION]).tolist()
    assert "# Tools" in text_of(directory, renderer.render([QUESTION], tools=TOOLS))


def test_a_bridge_keeps_every_token(directory: Path, renderer: PackageRenderer) -> None:
    prompt_ids, completion_ids = renderer.render([QUESTION], tools=TOOLS), ids_of(directory, f"{CALLED}<|im_end|>")
    ids = renderer.bridge(prompt_ids, completion_ids, [RESULT], tools=TOOLS)
    assert ids is not None
    assert ids[: len(prompt_ids) + len(completion_ids)].tolist() == [*prompt_ids, *completion_ids]
    assert text_of(directory, ids[len(prompt_ids) + len(completion_ids) :]).startswith(
        "\n<|im_start|>user\n<tool_response>\n42"
    )


def test_without_a_bridge_the_whole_conversation_is_rendered(directory: Path, renderer: PackageRenderer) -> None:
    """After a new question, Qwen's template drops earlier thinking, unless the package is configured to keep it."""
    messages = [QUESTION, {"role": "assistant", "content": "42"}, {"role": "user", "content": "Sure?"}]
    prompt_ids, completion_ids = (
        renderer.render(messages[:1]),
        ids_of(directory, "<think>\nhm\n</think>\n\n42<|im_end|>"),
    )
    turn = NextTurn(messages=messages, prompt_ids=prompt_ids, completion_ids=completion_ids, appended=1)
    assert next_prompt(renderer, turn).tolist() == renderer.render(messages).tolist()
    keeping = PackageRenderer(directory, {"name": "qwen3", "thinking_retention": "all"}, {})
    assert next_prompt(keeping, turn)[: len(prompt_ids) + len(completion_ids)].tolist() == [
        *prompt_ids,
        *completion_ids,
    ]


def test_a_completion_is_parsed(directory: Path, renderer: PackageRenderer) -> None:
    def parsed(text: str) -> dict[str, Any]:
        return renderer.message(ids_of(directory, text), prompt_ids=renderer.render([QUESTION]), tools=TOOLS)

    assert parsed("Yes.<|im_end|>") == {"role": "assistant", "content": "Yes."}
    assert parsed("<think>\nhm\n</think>\n\nYes.<|im_end|>")["reasoning_content"].strip() == "hm"
    called = parsed(f"{CALLED}<|im_end|>")
    assert called["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}]
    assert "add(1)" in parsed("<tool_call>\nadd(1)\n</tool_call><|im_end|>")["content"]


def test_template_arguments_reach_the_package(directory: Path) -> None:
    without_thinking = PackageRenderer(directory, {"name": "qwen3"}, {"enable_thinking": False})
    assert text_of(directory, without_thinking.render([QUESTION])).endswith("<think>\n\n</think>\n\n")


def test_the_packages_default_renderer_uses_the_directorys_template(directory: Path) -> None:
    default = PackageRenderer(directory, {"name": "default"}, {})
    assert default.render([QUESTION]).tolist() == DirectoryRenderer(directory, {}).render([QUESTION]).tolist()


def test_the_backend_renders_in_a_child_process(directory: Path, renderer: PackageRenderer) -> None:
    in_child = build(RendererSettings(backend="renderers", options={"name": "qwen3"}), str(directory))
    assert in_child.render([QUESTION]).tolist() == renderer.render([QUESTION]).tolist()


def test_invalid_options_and_messages_are_reported(directory: Path, renderer: PackageRenderer) -> None:
    with pytest.raises(ConfigError, match=r"policy\.renderer\.options .*name"):
        PackageRenderer(directory, {}, {})
    with pytest.raises(ConfigError, match=r"policy\.renderer\.options: "):
        PackageRenderer(directory, {"name": "qwen3", "colour": 3}, {})
    with pytest.raises(ConfigError, match=r"the renderer llama-3 does not fit"):
        PackageRenderer(directory, {"name": "llama-3"}, {})
    with pytest.raises(ConfigError, match=r"renderer qwen3 .* Unsupported chat_template_kwargs"):
        PackageRenderer(directory, {"name": "qwen3"}, {"colour": 3})
    with pytest.raises(BadRequest, match="refuses these messages"):
        renderer.render([])
