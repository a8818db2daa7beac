"""Renders with the package `renderers` over a tokenizer's directory. The package implements model
families in Python.

`transformers` is not needed.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from renderers import create_renderer
from renderers.base import ParsedToolCall, ToolCallParseStatus
from renderers.configs import RendererConfig

from headpond.errors import BadRequest, ConfigError
from headpond.renderers.chat_template import ChatTemplate
from headpond.renderers.protocol import NO_IDS, NO_VALUES, TemplateValues, Tools
from headpond.renderers.tokenizer_directory import TokenizerFiles
from headpond.turn import Ids, Message

# Limit for cached renderers of template values in requests. An agent uses one or two, and
# building one takes milliseconds.
MAX_VALUES = 8


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
        """Apply the directory's template. The package's `default` renderer calls this."""
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
        self._files, self._config, self._template_values = TokenizerFiles(directory), config, dict(template_values)
        self._by_values: OrderedDict[str, Any] = OrderedDict()  # least recently used first
        self._building = threading.Lock()
        try:
            self._renderer: Any = self._built(template_values)
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"the renderer {options['name']} does not fit {directory}: {error}") from error

    def _built(self, values: Mapping[str, Any]) -> Any:
        tokenizer = PackageTokenizer(self._files, values)
        return create_renderer(tokenizer, self._config, chat_template_kwargs=dict(values) or None)

    def _renderer_for(self, values: TemplateValues) -> Any:
        """Return the package's renderer for a request's template values: they are fixed when it
        is created."""
        if not values:
            return self._renderer
        key = json.dumps(dict(values), sort_keys=True)
        with self._building:
            if key not in self._by_values:
                try:
                    self._by_values[key] = self._built({**self._template_values, **values})
                except (ValueError, TypeError, AssertionError) as error:
                    raise BadRequest(f"chat_template_kwargs: the renderer refuses them: {error}") from error
                if len(self._by_values) > MAX_VALUES:
                    self._by_values.popitem(last=False)
            self._by_values.move_to_end(key)
            return self._by_values[key]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        generate: bool = True,
        values: TemplateValues = NO_VALUES,
    ) -> Ids:
        try:
            ids = self._renderer_for(values).render_ids(
                list(messages), tools=_list(tools), add_generation_prompt=generate
            )
        except (ValueError, TypeError, LookupError) as error:
            raise BadRequest(f"the renderer refuses these messages: {error}") from error
        return np.array(ids, np.int32)

    def bridge(
        self,
        prompt_ids: Ids,
        completion_ids: Ids,
        new_messages: Sequence[Message],
        *,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> Ids | None:
        try:
            bridged = self._renderer_for(values).bridge_to_next_turn(
                prompt_ids.tolist(), completion_ids.tolist(), list(new_messages), tools=_list(tools)
            )
        except (ValueError, TypeError, LookupError) as error:
            raise BadRequest(f"the renderer refuses these messages: {error}") from error
        return None if bridged is None else np.array(bridged.token_ids, np.int32)

    def texts(self, ids: Ids) -> list[str]:
        return self._files.tokenizer.decode_batch([[id] for id in ids.tolist()], skip_special_tokens=False)

    def message(
        self,
        completion_ids: Ids,
        *,
        prompt_ids: Ids = NO_IDS,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> dict[str, Any]:
        """Parse a completion. Tool calls that cannot be parsed stay in the content."""
        parsed = self._renderer_for(values).parse_response(
            completion_ids.tolist(), tools=_list(tools), prompt_ids=prompt_ids.tolist() or None
        )
        calls: list[ParsedToolCall] = parsed.tool_calls
        valid = [call for call in calls if call.status is ToolCallParseStatus.OK]
        content = parsed.content + "".join(call.raw for call in calls if call.status is not ToolCallParseStatus.OK)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if valid else "")}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if valid:
            message["tool_calls"] = [_call(call) for call in valid]
        return message


def _call(call: ParsedToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    id = {"id": call.id} if call.id else {}
    return {**id, "type": "function", "function": function}


def _list(tools: Tools) -> list[Mapping[str, Any]] | None:
    return list(tools) if tools else None
