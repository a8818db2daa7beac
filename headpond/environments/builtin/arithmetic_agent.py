"""The agent of `arithmetic_program.py`: a standalone script that uses an OpenAI-compatible URL.

OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=... python arithmetic_agent.py "What is 1 + 1? ..."
"""

import json
import os
import sys
import urllib.request

TURNS = 2


def chat(messages: list[dict[str, str]]) -> dict[str, str]:
    request = urllib.request.Request(  # noqa: S310  the caller sets the URL
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310
        return json.load(response)["choices"][0]["message"]


def main(question: str) -> None:
    messages = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        messages.append(chat(messages))
        if "Answer:" in (messages[-1]["content"] or ""):
            break
        messages.append({"role": "user", "content": "End with a line `Answer: N`."})
    sys.stdout.write(messages[-1]["content"] or "")


if __name__ == "__main__":
    main(sys.argv[1])
