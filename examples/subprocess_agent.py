"""An environment whose agent is a program that calls an OpenAI-compatible URL: here a shell script with curl.

    [environments.shell]
    use = "subprocess_agent:Shell"     # with examples/ on the worker's PYTHONPATH

The program has OPENAI_BASE_URL and OPENAI_API_KEY in its environment. When the rollout ends, the program and its
children are killed.
"""

import json

from headpond.environments import AgentPolicy, run_program

SCRIPT = """
curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
     -H "Content-Type: application/json" -d "$1"
"""


class Shell:
    external_agent = True
    examples = ("list files", "show the date", "count words")

    async def rollout(self, example: str, policy: AgentPolicy) -> float:
        question = f"Which command does this: {example}?"
        request = {"model": policy.model, "messages": [{"role": "user", "content": question}]}
        result = await run_program(["/bin/sh", "-c", SCRIPT, "sh", json.dumps(request)], policy)
        answer = json.loads(result.output)["choices"][0]["message"]["content"] if result.exit_code == 0 else ""
        return min(len(answer), 1_000) / 1_000
