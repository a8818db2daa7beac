"""Several questions in one conversation, with a tool: `conversations.py openai|anthropic|langgraph JSON_LIST`."""

import json
import os
import sys
from typing import Any

SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
MODEL = os.environ["OPENAI_MODEL"]
MOST_CALLS = 3


def total(given: dict[str, Any]) -> str:
    return str(int(given.get("a") or 0) + int(given.get("b") or 0))


def with_openai(questions: list[str]) -> None:
    from openai import OpenAI

    add: Any = {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}
    client, messages = OpenAI(), list[Any]()
    for question in questions:
        messages.append({"role": "user", "content": question})
        for _ in range(MOST_CALLS):
            with client.chat.completions.stream(
                model=MODEL, messages=messages, tools=[{"type": "function", "function": add}]
            ) as stream:
                message = stream.get_final_completion().choices[0].message
            messages.append(message)
            for call in message.tool_calls or []:
                result = total(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break


def with_anthropic(questions: list[str]) -> None:
    from anthropic import Anthropic

    add: Any = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}
    client, messages = Anthropic(), list[Any]()
    for question in questions:
        messages.append({"role": "user", "content": question})
        for _ in range(MOST_CALLS):
            message = client.messages.create(model=MODEL, max_tokens=96, messages=messages, tools=[add])
            messages.append({"role": "assistant", "content": message.content})
            calls: list[Any] = [block for block in message.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": total(call.input)} for call in calls]
            if not results:
                break
            messages.append({"role": "user", "content": results})


def with_langgraph(questions: list[str]) -> None:
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    graph: Any = create_agent(ChatOpenAI(model=MODEL), [add])
    messages: list[Any] = []
    for question in questions:
        messages = graph.invoke({"messages": [*messages, ("user", question)]})["messages"]


kind, questions = sys.argv[1:]
{"openai": with_openai, "anthropic": with_anthropic, "langgraph": with_langgraph}[kind](json.loads(questions))
