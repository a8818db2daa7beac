import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tokenizer_directory import TEMPLATE, tokenizer_dir
from tokenizers import Tokenizer

from headpond.config.engine import RendererSettings
from headpond.errors import BadRequest, ConfigError, InfrastructureFailure
from headpond.renderers import NextTurn, next_prompt
from headpond.renderers.pools import build
from headpond.renderers.tokenizer_directory import DirectoryRenderer
from headpond.turn import Ids

TOOLS = [{"type": "function", "function": {"name": "add", "description": "größer & <größer>"}}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_dir(tmp_path_factory.mktemp("tokenizers") / "small")


@pytest.fixture(scope="module")
def renderer(directory: Path) -> DirectoryRenderer:
    return DirectoryRenderer(directory, {})


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def text_of(directory: Path, ids: Ids) -> str:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).decode(ids.tolist(), skip_special_tokens=False)


def ids_of(directory: Path, text: str) -> Ids:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def test_messages_are_rendered_by_the_template(directory: Path, renderer: DirectoryRenderer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("What is 12 + 30?")]
    ids = renderer.render(messages, tools=TOOLS)
    spec = '{"type": "function", "function": {"name": "add", "description": "größer & <größer>"}}'
    assert text_of(directory, ids) == (
        f"<|im_start|>system\nBe brief.\n{spec}\n<|im_end|>\n<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.dtype == np.int32
    closed = text_of(directory, renderer.render(messages, tools=TOOLS, generate=False))
    assert text_of(directory, ids) == f"{closed}<|im_start|>assistant\n"


def test_template_arguments_are_applied(directory: Path) -> None:
    without_thinking = DirectoryRenderer(directory, {"enable_thinking": False})
    assert text_of(directory, without_thinking.render([user("x")])).endswith("assistant\n<think>\n\n</think>\n\n")


CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 12}'}}]}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'


@pytest.mark.parametrize(
    ("completion", "appended"),
    [
        ("The dog does not mind.<|im_end|>", [user("And the fox?")]),
        (f"{CALLED}<|im_end|>", [tool("42")]),
        (f"{CALLED}\n{CALLED}<|im_end|>", [tool("42"), tool("43")]),
        ("<think>\nhm\n</think>\n\nYes.<|im_end|>", [tool("42"), user("Sure?")]),
        ("", [user("Why is that empty?")]),
    ],
)
def test_a_bridge_keeps_every_token_and_renders_the_rest_like_the_template(
    directory: Path, renderer: DirectoryRenderer, completion: str, appended: list[dict[str, Any]]
) -> None:
    messages = [user("What is 12 + 30?")]
    prompt_ids, completion_ids = renderer.render(messages, tools=TOOLS), ids_of(directory, completion)
    ids = renderer.bridge(prompt_ids, completion_ids, appended, tools=TOOLS)
    assert ids is not None
    history = [*prompt_ids, *completion_ids]
    assert ids[: len(history)].tolist() == history
    rest = text_of(directory, ids[len(history) :])
    whole = text_of(directory, renderer.render([*messages, CALL, *appended], tools=TOOLS))
    assert whole.endswith(rest)
    assert rest.startswith("\n<|im_start|>" if completion else "<|im_end|>\n<|im_start|>")


def test_a_bridge_equals_the_full_rendering_if_the_completion_is_tokenized_the_same(
    directory: Path, renderer: DirectoryRenderer
) -> None:
    messages = [user("What is 12 + 30?")]
    completion_ids = ids_of(directory, f"{CALLED}<|im_end|>")
    bridged = renderer.bridge(renderer.render(messages), completion_ids, [tool("42")])
    assert bridged is not None
    assert bridged.tolist() == renderer.render([*messages, CALL, tool("42")]).tolist()


def test_a_cut_off_completion_is_closed(directory: Path, renderer: DirectoryRenderer) -> None:
    ids = renderer.bridge(renderer.render([user("x")]), ids_of(directory, "The quick"), [user("go on")])
    assert ids is not None
    assert "The quick<|im_end|>\n<|im_start|>user\ngo on<|im_end|>" in text_of(directory, ids)


def test_every_end_token_of_the_generation_config_ends_a_completion(tmp_path: Path) -> None:
    directory = tokenizer_dir(tmp_path / "two")
    end = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("<|endoftext|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    renderer = DirectoryRenderer(directory, {})
    ids = renderer.bridge(renderer.render([user("x")]), ids_of(directory, "y<|endoftext|>"), [user("z")])
    assert ids is not None
    assert "y<|endoftext|>\n<|im_start|>user" in text_of(directory, ids)


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message.content }}\n{% endfor %}",  # no token closes a completion
        "{% for message in messages %}{{ message.content }} and so on<|im_end|>{% endfor %}",  # tokens may merge
        "{% if messages|length > 2 %}{{ raise_exception('no') }}{% endif %}{{ messages[1].content }}<|im_end|>",
        "{% for message in messages %}{{ message.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}",
        "{% for message in messages %}{{ message.content|lower }}<|im_end|>{% endfor %}",
    ],
)
def test_templates_that_do_not_guarantee_the_prefix_have_no_bridge(tmp_path: Path, template: str) -> None:
    renderer = DirectoryRenderer(tokenizer_dir(tmp_path / "odd", template=template), {})
    assert renderer.bridge(np.array([1, 2], np.int32), np.array([3], np.int32), [user("x")]) is None


def test_without_a_bridge_the_whole_conversation_is_rendered(renderer: DirectoryRenderer) -> None:
    messages = [user("x"), {"role": "assistant", "content": "y"}, {"role": "assistant", "content": "z"}, user("?")]
    some = np.array([1, 2, 3], np.int32)
    turn = NextTurn(messages=messages, prompt_ids=some, completion_ids=some, appended=2)
    assert next_prompt(renderer, turn).tolist() == renderer.render(messages).tolist()


def test_a_bridge_that_changes_history_is_discarded(directory: Path) -> None:
    class Careless(DirectoryRenderer):
        def bridge(self, prompt_ids: Ids, completion_ids: Ids, *args: Any, **more: Any) -> Ids:
            return np.concatenate([prompt_ids, completion_ids[:-1], prompt_ids])

    careless, messages = Careless(directory, {}), [user("x"), {"role": "assistant", "content": "y"}, user("z")]
    turn = NextTurn(
        messages=messages,
        prompt_ids=careless.render(messages[:1]),
        completion_ids=ids_of(directory, "y<|im_end|>"),
        appended=1,
    )
    assert next_prompt(careless, turn).tolist() == careless.render(messages).tolist()


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("Yes.<|im_end|>", {"content": "Yes."}),
        ("<think>\nhm\n</think>\n\nYes.", {"content": "Yes.", "reasoning_content": "hm"}),
        ("hm\n</think>\n\nYes.", {"content": "Yes.", "reasoning_content": "hm"}),
        ("<think>\nhm", {"content": "<think>\nhm"}),
        ("<tool_call>\nadd(1)\n</tool_call>", {"content": "<tool_call>\nadd(1)\n</tool_call>"}),
        ('<tool_call>{"name": 3}</tool_call>', {"content": '<tool_call>{"name": 3}</tool_call>'}),
    ],
)
def test_a_completion_is_parsed(
    directory: Path, renderer: DirectoryRenderer, completion: str, message: dict[str, Any]
) -> None:
    assert renderer.message(ids_of(directory, completion)) == {"role": "assistant", **message}


def test_tool_calls_are_parsed(directory: Path, renderer: DirectoryRenderer) -> None:
    message = renderer.message(ids_of(directory, f"I call.\n{CALLED}\n{CALLED}<|im_end|>"))
    assert message["content"] == "I call."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "add"]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 12}'}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "unknown", "content": "x"},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": 3},
        {"role": "assistant", "tool_calls": [3]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]},
    ],
)
def test_messages_that_cannot_be_rendered_are_a_bad_request(
    renderer: DirectoryRenderer, message: dict[str, Any]
) -> None:
    with pytest.raises(BadRequest):
        renderer.render([message])


def test_text_parts_are_concatenated(renderer: DirectoryRenderer) -> None:
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "fox"}]
    assert renderer.render([{"role": "user", "content": parts}]).tolist() == renderer.render([user("The fox")]).tolist()


def test_a_template_may_be_a_separate_file_or_a_named_one(tmp_path: Path) -> None:
    named = tokenizer_dir(tmp_path / "named", chat_template=[{"name": "default", "template": TEMPLATE}])
    beside = tokenizer_dir(tmp_path / "beside", template=None)
    (beside / "chat_template.jinja").write_text(TEMPLATE)
    one, other = (DirectoryRenderer(directory, {}).render([user("x")]).tolist() for directory in (named, beside))
    assert one == other


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    renderer = DirectoryRenderer(tokenizer_dir(tmp_path / "evil", template=template), {})
    with pytest.raises(BadRequest, match=r"chat template .*: access to attribute"):
        renderer.render([user("x")])


def test_problems_of_a_directory_are_reported(tmp_path: Path) -> None:
    def built(directory: Path) -> object:
        return build(RendererSettings(backend="directory"), str(directory))

    with pytest.raises(ConfigError, match=r"nowhere .*tokenizer\.json.* policy\.renderer"):
        built(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no chat template, neither in"):
        built(tokenizer_dir(tmp_path / "bare", template=None))
    with pytest.raises(ConfigError, match=r"chat template .*syntax error.* line 1"):
        built(tokenizer_dir(tmp_path / "syntax", template="{% if %}"))
    broken = tokenizer_dir(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(InfrastructureFailure, match=r"renderer directory of .*broken .*: "):
        built(broken)
    (broken / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        built(broken)
