"""A Hugging Face tokenizer's directory: `tokenizer.json`, `tokenizer_config.json` and its chat template.

Traps of the package `tokenizers`: reading a file holds the GIL for its whole call, `encode` too (`encode_batch_fast`
does not); a file may carry truncation and padding, which would cut prompts.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from penstock.errors import BadRequest, ConfigError
from penstock.renderers.parsing import message_of
from penstock.renderers.protocol import NO_IDS, Tools
from penstock.renderers.templates import ChatTemplate
from penstock.turn import Ids, Message

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Stands for an answer where only what the template writes around it matters. No template trims or parses it.
ANSWER = "PENSTOCK0ANSWER"
BEFORE: Sequence[Message] = ({"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER})


class TokenizerFiles:
    """What the files of a directory say."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json: give the directory of a Hugging Face tokenizer, one that has a "
                "fast version (policy.renderer)"
            )
        self.directory = directory
        self.config = _json(directory / "tokenizer_config.json")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @property
    def special_tokens(self) -> dict[str, str]:
        named = {name: _token(self.config.get(name)) for name in SPECIAL_TOKENS}
        return {name: token for name, token in named.items() if token is not None}

    @property
    def end_ids(self) -> frozenset[int]:
        """What a policy may end its answer with."""
        generation = _json(self.directory / "generation_config.json").get("eos_token_id")
        ends = {end for end in (generation if isinstance(generation, list) else [generation]) if isinstance(end, int)}
        token = self.special_tokens.get("eos_token")
        eos = None if token is None else self.tokenizer.token_to_id(token)
        return frozenset(ends if eos is None else ends | {eos})

    def chat_template(self) -> str:
        own = self.directory / "chat_template.jinja"
        template = own.read_text() if own.is_file() else self.config.get("chat_template")
        if isinstance(template, list):  # several by name, of which one is for everything
            template = {each["name"]: each["template"] for each in template}.get("default")
        if not isinstance(template, str):
            raise ConfigError(
                f"{self.directory} has no chat template, neither in chat_template.jinja nor in tokenizer_config.json: "
                "add the one that the model was trained with"
            )
        return template


class DirectoryRenderer:
    def __init__(self, directory: Path, template_values: Mapping[str, Any]) -> None:
        files = TokenizerFiles(directory)
        self._tokenizer = files.tokenizer
        self._template = ChatTemplate(files.chat_template(), {**files.special_tokens, **template_values})
        self._end_ids = files.end_ids
        self._closing = self._following([], tools=None, generate=False)

    def render(self, messages: Sequence[Message], *, tools: Tools = None, generate: bool = True) -> Ids:
        return self._encode(self._template.text(messages, tools=tools, generate=generate))

    def bridge(
        self, prompt_ids: Ids, completion_ids: Ids, new_messages: Sequence[Message], *, tools: Tools = None
    ) -> Ids | None:
        """What the template writes behind an answer begins with a special token, so that its ids do not depend on the
        answer; where the policy has said that token itself, it is not said again."""
        if self._closing is None or any(message.get("role") == "assistant" for message in new_messages):
            return None
        following = self._following(new_messages, tools=tools, generate=True)
        if following is None or not following.startswith(self._closing):
            return None
        following_ids = self._encode(following)
        if not self._is_special(following_ids[0]):
            return None
        said_end = len(completion_ids) and completion_ids[-1] in {*self._end_ids, int(following_ids[0])}
        return np.concatenate([prompt_ids, completion_ids, following_ids[1:] if said_end else following_ids])

    def message(self, completion_ids: Ids, *, prompt_ids: Ids = NO_IDS, tools: Tools = None) -> dict[str, Any]:
        return message_of(self._tokenizer.decode_batch([completion_ids.tolist()], skip_special_tokens=True)[0])

    def _encode(self, text: str) -> Ids:
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, np.int32)

    def _following(self, new_messages: Sequence[Message], *, tools: Tools, generate: bool) -> str | None:
        """What the template writes behind an answer."""
        try:
            text = self._template.text([*BEFORE, *new_messages], tools=tools, generate=generate)
        except BadRequest:  # it wants a system message first, or to see the call that a tool answers
            return None
        _, _, following = text.partition(ANSWER)
        return following if following and ANSWER not in following else None

    def _is_special(self, id_: np.int32) -> bool:
        added = self._tokenizer.get_added_tokens_decoder().get(int(id_))
        return added is not None and added.special


def _json(path: Path) -> dict[str, Any]:
    """Empty when there is none."""
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
