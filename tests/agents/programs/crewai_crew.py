"""crewai: a crew of one agent with a tool: `crewai_crew.py TASK`."""

import os
import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("look")
def look(place: str, times: int) -> str:
    """Look at a place."""
    return f"{place}: nothing, seen {times} times"


llm = LLM(model=f"openai/{os.environ['OPENAI_MODEL']}", base_url=os.environ["OPENAI_BASE_URL"])
agent = Agent(role="explorer", goal="explore", backstory="You explore.", llm=llm, tools=[look])
task = Task(description=sys.argv[1], expected_output="a report", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff())
