"""mini-swe-agent: its default agent in a local shell: `mini_swe_agent.py TASK`."""

import os
import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name=f"openai/{os.environ['OPENAI_MODEL']}",
    model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"]},
    cost_tracking="ignore_errors",
)
agent = DefaultAgent(
    model, LocalEnvironment(), system_template="You work in a shell.", instance_template="{{task}}", step_limit=9
)
print(agent.run(sys.argv[1])["submission"])
