"""A loop over the `openai` package: `openai_sdk.py chat|streamed|structured|responses|responses_streamed TASK`."""

import json
import os
import sys
from typing import Any

from openai import OpenAI
from pydantic import BaseModel

MODEL = os.environ["OPENAI_MODEL"]
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "times": {"type": "integer"}},
    "required": ["place", "times"],
    "additionalProperties": False,
}
LOOK = {"name": "look", "description": "Look at a place.", "parameters": PARAMETERS}


class Report(BaseModel):
    summary: str
    places: int


def look(arguments: str) -> str:
    given = json.loads(arguments)
    return f"{given['place']}: nothing, seen {given['times']} times"


def chat(client: OpenAI, task: str, how: str) -> str | None:
    messages: list[Any] = [{"role": "system", "content": "You explore."}, {"role": "user", "content": task}]
    options: Any = {"model": MODEL, "tools": [{"type": "function", "function": LOOK}]}
    while True:
        if how == "streamed":
            with client.chat.completions.stream(messages=messages, **options) as stream:
                completion: Any = stream.get_final_completion()
        elif how == "structured":
            strict = [{"type": "function", "function": {**LOOK, "strict": True}}]
            completion = client.chat.completions.parse(
                messages=messages, model=MODEL, tools=strict, response_format=Report
            )
        else:
            completion = client.chat.completions.create(messages=messages, **options)
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.parsed.summary if how == "structured" else message.content
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": look(call.function.arguments)}
            for call in message.tool_calls
        ]


def responses(client: OpenAI, task: str, *, streamed: bool) -> str:
    items: list[Any] = [{"role": "developer", "content": "You explore."}, {"role": "user", "content": task}]
    options: Any = {"model": MODEL, "tools": [{"type": "function", **LOOK}], "store": False}
    while True:
        if streamed:
            with client.responses.stream(input=items, **options) as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.create(input=items, **options)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": look(call.arguments)} for call in calls
        ]


how, task = sys.argv[1:]
client = OpenAI()
if how.startswith("responses"):
    print(responses(client, task, streamed=how == "responses_streamed"))
else:
    print(chat(client, task, how))
