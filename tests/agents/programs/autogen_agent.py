"""autogen: an AssistantAgent with a tool: `autogen_agent.py TASK`."""

import asyncio
import os
import sys
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def look(place: str, times: int) -> str:
    """Look at a place."""
    return f"{place}: nothing, seen {times} times"


async def main(task: str) -> None:
    client = OpenAIChatCompletionClient(
        model=os.environ["OPENAI_MODEL"], base_url=os.environ["OPENAI_BASE_URL"], model_info=INFO
    )
    agent = AssistantAgent(
        "explorer", model_client=client, tools=[look], system_message="You explore.", max_tool_iterations=9
    )
    result = await agent.run(task=task)
    print(getattr(result.messages[-1], "content", None))
    await client.close()


asyncio.run(main(sys.argv[1]))
