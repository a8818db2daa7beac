"""What a session decides about its chats, whatever the client sends: model, sampling, and which are not the task."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from multidict import CIMultiDictProxy

from headpond.config.sessions import LeaveOut, Sessions
from headpond.errors import BadRequest

TRAIN_HEADER = "x-headpond-train"
SYNONYMS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
"""Fields with one meaning: forcing one removes the other."""
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, kw_only=True)
class ChatRules:
    defaults: Mapping[str, Any]
    forced: Mapping[str, Any]
    """None removes a field."""
    leave_out: Mapping[str, LeaveOut]

    @classmethod
    def of(cls, settings: Sessions, *, sampling: Mapping[str, Any], forced: Mapping[str, Any]) -> "ChatRules":
        """`sampling` and `forced` are those that the session was created with."""
        model = {} if settings.model is None else {"model": settings.model}
        return cls(defaults=sampling, forced={**model, **settings.forced, **forced}, leave_out=settings.leave_out)

    def applied(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        replaced = {SYNONYMS[name] for name in self.forced if name in SYNONYMS}
        decided = {name: value for name, value in {**self.defaults, **fields}.items() if name not in replaced}
        return {name: value for name, value in {**decided, **self.forced}.items() if name not in self._unset}

    def left_out_by(self, fields: Mapping[str, Any], headers: CIMultiDictProxy[str]) -> str:
        """What leaves a chat out of training, the header or the name of a rule; empty for one that is trained on.
        `fields` are the client's."""
        match headers.get(TRAIN_HEADER, "true").strip().lower():
            case "false":
                return TRAIN_HEADER
            case "true":
                return next((name for name, rule in self.leave_out.items() if _matches(rule, fields)), "")
            case other:
                raise BadRequest(f"{TRAIN_HEADER} must be true or false, not {other!r}")

    @property
    def _unset(self) -> frozenset[str]:
        return frozenset(name for name, value in self.forced.items() if value is None)


def _matches(rule: LeaveOut, fields: Mapping[str, Any]) -> bool:
    messages = cast("list[Mapping[str, Any]]", fields.get("messages") or [])
    if rule.model is not None and not re.search(rule.model, str(fields.get("model") or "")):
        return False
    if rule.system is not None:
        texts = (_text(message) for message in messages if message.get("role") in SYSTEM_ROLES)
        if not re.search(rule.system, "\n\n".join(texts)):
            return False
    if rule.user is not None:
        last = next((message for message in reversed(messages) if message.get("role") == "user"), {})
        return re.search(rule.user, _text(last)) is not None
    return True


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else [{"text": content}]
    return "\n\n".join(text for part in parts if isinstance(text := part.get("text"), str))
