"""What an answer's text says where no package knows the model: thoughts in `<think>`, tool calls as JSON in tags."""

import json
import re
from typing import Any

THOUGHT = re.compile(r"\s*(?:<think>)?(?P<thought>.*?)</think>\s*", re.DOTALL)
TOOL_CALL = re.compile(r"<tool_call>\s*(?P<call>.*?)\s*</tool_call>", re.DOTALL)


def message_of(text: str) -> dict[str, Any]:
    """Calls are taken out of the text only when all of them can be read: otherwise the policy wrote text."""
    thought = THOUGHT.match(text)
    said = text[thought.end() :] if thought else text
    calls = [_call(number, found["call"]) for number, found in enumerate(TOOL_CALL.finditer(said))]
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if calls and all(calls):
        message |= {"content": said[: said.index("<tool_call>")].rstrip() or None, "tool_calls": calls}
    if thought:
        message["reasoning_content"] = thought["thought"].strip("\n")
    return message


def _call(number: int, text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    match call:
        case {"name": str(name), "arguments": dict() | str() as arguments}:
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            function = {"name": name, "arguments": written}
            return {"id": f"call_{number}", "type": "function", "function": function}
        case _:
            return None
