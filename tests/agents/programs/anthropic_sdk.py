"""A loop over the `anthropic` package, thoughts on: `anthropic_sdk.py messages|streamed TASK`."""

import os
import sys
from typing import Any

from anthropic import Anthropic

LOOK: Any = {
    "name": "look",
    "description": "Look at a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["place", "times"],
    },
}
how, task = sys.argv[1:]
client = Anthropic()
messages: list[Any] = [{"role": "user", "content": task}]
options: Any = {
    "model": os.environ["ANTHROPIC_MODEL"],
    "max_tokens": 4096,
    "system": "You explore.",
    "tools": [LOOK],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
while True:
    if how == "streamed":
        with client.messages.stream(messages=messages, **options) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(messages=messages, **options)
    messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    if not calls:
        print(message.content[-1].text)
        break
    results = [
        {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": f"{call.input['place']}: nothing, seen {call.input['times']} times",
        }
        for call in calls
    ]
    messages.append({"role": "user", "content": results})
