"""Renders with the directory of a Hugging Face tokenizer: `tokenizer.json`,
`tokenizer_config.json`, chat template.

Traps of the package `tokenizers`: reading a file and `encode` hold the GIL for the whole call
(`encode_batch_fast` does not). A file may set truncation and padding, which would cut prompts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from headpond.errors import BadRequest, ConfigError
from headpond.renderers.chat_template import ChatTemplate
from headpond.renderers.protocol import NO_IDS, NO_VALUES, TemplateValues, Tools
from headpond.turn import Ids, Message

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Replaces a completion where only the template's text after it matters. No template trims or parses
# the placeholder.
PLACEHOLDER = "HEADPOND0ANSWER"
HISTORY: Sequence[Message] = ({"role": "user", "content": "x"}, {"role": "assistant", "content": PLACEHOLDER})
THINKING = re.compile(r"\s*(?:<think>)?(?P<thinking>.*?)</think>\s*", re.DOTALL)
TOOL_CALL = re.compile(r"<tool_call>\s*(?P<call>.*?)\s*</tool_call>", re.DOTALL)


class TokenizerFiles:
    """The tokenizer, special tokens and chat template of a directory."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json: set policy.renderer to the directory of a Hugging Face tokenizer "
                "with a fast version"
            )
        self.directory = directory
        self.config = _read_json(directory / "tokenizer_config.json")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @property
    def special_tokens(self) -> dict[str, str]:
        named = {name: _token(self.config.get(name)) for name in SPECIAL_TOKENS}
        return {name: token for name, token in named.items() if token is not None}

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        generation = _read_json(self.directory / "generation_config.json").get("eos_token_id")
        ends = {end for end in (generation if isinstance(generation, list) else [generation]) if isinstance(end, int)}
        token = self.special_tokens.get("eos_token")
        eos = None if token is None else self.tokenizer.token_to_id(token)
        return frozenset(ends if eos is None else ends | {eos})

    def chat_template(self) -> str:
        file = self.directory / "chat_template.jinja"
        template = file.read_text() if file.is_file() else self.config.get("chat_template")
        if isinstance(template, list):  # A list has several named templates.
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if not isinstance(template, str):
            raise ConfigError(
                f"{self.directory} has no chat template, neither in chat_template.jinja nor in tokenizer_config.json: "
                "add the template that the model was trained with"
            )
        return template


class DirectoryRenderer:
    def __init__(self, directory: Path, template_values: Mapping[str, Any]) -> None:
        files = TokenizerFiles(directory)
        self._tokenizer = files.tokenizer
        self._template = ChatTemplate(files.chat_template(), {**files.special_tokens, **template_values})
        self._end_ids = files.end_ids
        self._closing = self._text_after_completion([], tools=None, generate=False)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        generate: bool = True,
        values: TemplateValues = NO_VALUES,
    ) -> Ids:
        return self._encode(self._template.text(messages, tools=tools, generate=generate, values=values))

    def bridge(
        self,
        prompt_ids: Ids,
        completion_ids: Ids,
        new_messages: Sequence[Message],
        *,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> Ids | None:
        """Append the text that the template puts after a completion. It must begin with a
        special token: its ids then do not depend on the completion. A completion that ends with
        that token does not get it twice."""
        closing = (
            self._text_after_completion([], tools=None, generate=False, values=values) if values else self._closing
        )
        if closing is None or any(message.get("role") == "assistant" for message in new_messages):
            return None
        following = self._text_after_completion(new_messages, tools=tools, generate=True, values=values)
        if following is None or not following.startswith(closing):
            return None
        following_ids = self._encode(following)
        if not self._is_special(following_ids[0]):
            return None
        has_end = len(completion_ids) and completion_ids[-1] in {*self._end_ids, int(following_ids[0])}
        return np.concatenate([prompt_ids, completion_ids, following_ids[1:] if has_end else following_ids])

    def texts(self, ids: Ids) -> list[str]:
        return self._tokenizer.decode_batch([[id] for id in ids.tolist()], skip_special_tokens=False)

    def message(
        self,
        completion_ids: Ids,
        *,
        prompt_ids: Ids = NO_IDS,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> dict[str, Any]:
        return parse_completion(self._tokenizer.decode_batch([completion_ids.tolist()], skip_special_tokens=True)[0])

    def _encode(self, text: str) -> Ids:
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, np.int32)

    def _text_after_completion(
        self, new_messages: Sequence[Message], *, tools: Tools, generate: bool, values: TemplateValues = NO_VALUES
    ) -> str | None:
        """Return the text that the template puts after a completion, or None if it cannot be
        determined."""
        try:
            text = self._template.text([*HISTORY, *new_messages], tools=tools, generate=generate, values=values)
        # The template requires a system message, or the tool call that a tool message answers.
        except BadRequest:
            return None
        _, _, following = text.partition(PLACEHOLDER)
        return following if following and PLACEHOLDER not in following else None

    def _is_special(self, id_: np.int32) -> bool:
        added = self._tokenizer.get_added_tokens_decoder().get(int(id_))
        return added is not None and added.special


def parse_completion(text: str) -> Message:
    """Parse a completion. `<think>` becomes reasoning_content, JSON in `<tool_call>` tags
    becomes tool calls. If one call cannot be parsed, all stay in the content."""
    thinking = THINKING.match(text)
    content = text[thinking.end() :] if thinking else text
    calls = [_parse_call(match["call"]) for match in TOOL_CALL.finditer(content)]
    message: Message = {"role": "assistant", "content": content}
    if calls and all(calls):
        message |= {"content": content[: content.index("<tool_call>")].rstrip() or None, "tool_calls": calls}
    if thinking:
        message["reasoning_content"] = thinking["thinking"].strip("\n")
    return message


def _parse_call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    match call:
        case {"name": str(name), "arguments": dict() | str() as arguments}:
            encoded = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            function = {"name": name, "arguments": encoded}
            return {"type": "function", "function": function}
        case _:
            return None


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        return cast("dict[str, Any]", json.loads(path.read_bytes()))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def _token(token: object) -> str | None:
    match token:
        case str():
            return token
        case {"content": str(content)}:
            return content
        case _:
            return None
