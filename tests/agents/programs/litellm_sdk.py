"""A loop over `litellm.completion`: `litellm_sdk.py TASK`."""

import json
import os
import sys
from typing import Any

import litellm

LOOK = {
    "name": "look",
    "description": "Look at a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "times": {"type": "integer"}}},
}
messages: list[Any] = [{"role": "system", "content": "You explore."}, {"role": "user", "content": sys.argv[1]}]
while True:
    response: Any = litellm.completion(
        model=f"openai/{os.environ['OPENAI_MODEL']}",
        api_base=os.environ["OPENAI_BASE_URL"],
        messages=messages,
        tools=[{"type": "function", "function": LOOK}],
    )
    message = response.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        given = json.loads(call.function.arguments)
        result = f"{given['place']}: nothing, seen {given['times']} times"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
