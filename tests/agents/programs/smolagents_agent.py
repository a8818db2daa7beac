"""smolagents: `smolagents_agent.py tools|code TASK`. It sends its own calls back as text."""

import os
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def look(place: str, times: int) -> str:
    """Look at a place.

    Args:
        place: Which one.
        times: How often.
    """
    return f"{place}: nothing, seen {times} times"


how, task = sys.argv[1:]
model = OpenAIModel(model_id=os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"])
kind = ToolCallingAgent if how == "tools" else CodeAgent
print(kind(tools=[look], model=model, verbosity_level=0, max_steps=9).run(task))
