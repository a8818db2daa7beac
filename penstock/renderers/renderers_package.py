"""Renders with the package `renderers`, which implements model families in Python, over a tokenizer's directory.

Does not need `transformers`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from renderers import create_renderer
from renderers.base import ParsedToolCall, ToolCallParseStatus
from renderers.configs import RendererConfig

from penstock.errors import BadRequest, ConfigError
from penstock.renderers.chat_template import ChatTemplate
from penstock.renderers.protocol import NO_IDS, Tools
from penstock.renderers.tokenizer_directory import TokenizerFiles
from penstock.turn import Ids, Message


class PackageTokenizer:
    """The tokenizer interface that the package expects."""

    def __init__(self, files: TokenizerFiles, template_values: Mapping[str, Any]) -> None:
        self._files = files
        self._tokenizer = files.tokenizer
        self._template_values = template_values
        self.name_or_path = str(files.config.get("name_or_path") or files.directory)
        self.eos_token_id = self.convert_tokens_to_ids(files.special_tokens.get("eos_token"))
        self.unk_token_id = self.convert_tokens_to_ids(files.special_tokens.get("unk_token"))
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.all_special_tokens = [token.content for token in added if token.special]

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, list):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        return None if tokens is None else self._tokenizer.token_to_id(tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **values: Any,
    ) -> str | list[int]:
        """Called by the package's `default` renderer."""
        variables = {**self._files.special_tokens, **self._template_values, **values}
        template = ChatTemplate(self._files.chat_template(), variables)
        text = template.text(messages, tools=tools, generate=add_generation_prompt)
        return self.encode(text) if tokenize else text


class PackageRenderer:
    def __init__(self, directory: Path, options: Mapping[str, Any], template_values: Mapping[str, Any]) -> None:
        if "name" not in options:
            raise ConfigError(
                'policy.renderer.options needs the name of one of the package\'s renderers, such as name = "qwen3"'
            )
        try:
            config = TypeAdapter[Any](RendererConfig).validate_python(dict(options))
        except ValidationError as error:
            problems = "; ".join(problem["msg"] for problem in error.errors())
            raise ConfigError(f"policy.renderer.options: the package refuses them: {problems}") from error
        tokenizer = PackageTokenizer(TokenizerFiles(directory), template_values)
        try:
            self._renderer: Any = create_renderer(tokenizer, config, chat_template_kwargs=template_values or None)
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"the renderer {options['name']} does not fit {directory}: {error}") from error

    def render(self, messages: Sequence[Message], *, tools: Tools = None, generate: bool = True) -> Ids:
        try:
            ids = self._renderer.render_ids(list(messages), tools=_list(tools), add_generation_prompt=generate)
        except (ValueError, TypeError, LookupError) as error:
            raise BadRequest(f"the renderer refuses these messages: {error}") from error
        return np.array(ids, np.int32)

    def bridge(
        self, prompt_ids: Ids, completion_ids: Ids, new_messages: Sequence[Message], *, tools: Tools = None
    ) -> Ids | None:
        try:
            bridged = self._renderer.bridge_to_next_turn(
                prompt_ids.tolist(), completion_ids.tolist(), list(new_messages), tools=_list(tools)
            )
        except (ValueError, TypeError, LookupError) as error:
            raise BadRequest(f"the renderer refuses these messages: {error}") from error
        return None if bridged is None else np.array(bridged.token_ids, np.int32)

    def message(self, completion_ids: Ids, *, prompt_ids: Ids = NO_IDS, tools: Tools = None) -> dict[str, Any]:
        """Tool calls that cannot be parsed stay in the content."""
        parsed = self._renderer.parse_response(
            completion_ids.tolist(), tools=_list(tools), prompt_ids=prompt_ids.tolist() or None
        )
        calls: list[ParsedToolCall] = parsed.tool_calls
        valid = [call for call in calls if call.status is ToolCallParseStatus.OK]
        content = parsed.content + "".join(call.raw for call in calls if call.status is not ToolCallParseStatus.OK)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if valid else "")}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if valid:
            message["tool_calls"] = [_call(number, call) for number, call in enumerate(valid)]
        return message


def _call(number: int, call: ParsedToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id or f"call_{number}", "type": "function", "function": function}


def _list(tools: Tools) -> list[Mapping[str, Any]] | None:
    return list(tools) if tools else None
