"""langgraph: the agent of `langchain`, a graph of model and tools: `langgraph_agent.py TASK`."""

import os
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def look(place: str, times: int) -> str:
    """Look at a place."""
    return f"{place}: nothing, seen {times} times"


graph = create_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [look], system_prompt="You explore.")
print(graph.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
