"""An environment whose agent is any program that speaks to an OpenAI-compatible URL: here a shell script, with curl.

    [environments.shell]
    use = "subprocess_agent:Shell"     # with examples/ on the worker's PYTHONPATH

The program finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment. However the rollout ends, the program and
everything that it started is killed.
"""

import json

from penstock.environments import AgentPolicy, run_program

SCRIPT = """
curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
     -H "Content-Type: application/json" -d "$1"
"""


class Shell:
    external_agent = True
    examples = ("list files", "show the date", "count words")

    async def rollout(self, example: str, policy: AgentPolicy) -> float:
        question = f"Which command does this: {example}?"
        asked = {"model": policy.model, "messages": [{"role": "user", "content": question}]}
        ended = await run_program(["/bin/sh", "-c", SCRIPT, "sh", json.dumps(asked)], policy)
        said = json.loads(ended.output)["choices"][0]["message"]["content"] if ended.exit_code == 0 else ""
        return min(len(said), 1_000) / 1_000
