"""pydantic-ai: `pydantic_ai_agent.py chat|responses|messages TASK`."""

import os
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

MODELS: dict[str, Any] = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
how, task = sys.argv[1:]
agent = Agent(MODELS[how](os.environ["OPENAI_MODEL"]), instructions="You explore.")


@agent.tool_plain
def look(place: str, times: int) -> str:
    """Look at a place."""
    return f"{place}: nothing, seen {times} times"


print(agent.run_sync(task).output)
