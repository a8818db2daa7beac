"""openai-agents: `openai_agents_sdk.py chat|responses TASK`."""

import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def look(place: str, times: int) -> str:
    """Look at a place."""
    return f"{place}: nothing, seen {times} times"


how, task = sys.argv[1:]
set_tracing_disabled(True)
set_default_openai_api("chat_completions" if how == "chat" else "responses")
agent = Agent(name="explorer", instructions="You explore.", model=os.environ["OPENAI_MODEL"], tools=[look])
print(Runner.run_sync(agent, task).final_output)
