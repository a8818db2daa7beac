"""Engines as processes, and requests to them that return the raw bytes."""

import http.client
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from support.cluster import Process
from support.waiting import HANG_S, wait_until

HEADPOND = str(Path(sys.executable).parent / "headpond")
CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
READY = re.compile(r"action=engine_ready url=http://([\d.]+):(\d+)")

RECORDED_FIELDS: dict[str, dict[str, Any]] = {
    "vllm": {"logprobs": True, "return_token_ids": True},
    "sglang": {
        "logprobs": True,
        "return_prompt_token_ids": True,
        "return_meta_info": True,
        "return_routed_experts": True,
    },
}
"""Request fields for everything that is recorded, by dialect."""


class EngineProcess(Process):
    def __init__(self, directory: Path, *arguments: str) -> None:
        name = f"engine-{len(list(directory.iterdir()))}"
        super().__init__(name, [HEADPOND, "engine", "--port", "0", *arguments], dict(os.environ), directory)

    @property
    def address(self) -> tuple[str, int]:
        """Waits until the engine listens."""
        match = wait_until(lambda: READY.search(self.text) or self.exit_code is not None)
        assert isinstance(match, re.Match), f"the engine ended:\n{self.text}"
        return match[1], int(match[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=HANG_S)

    def request(self, path: str, request: Any = None, *, method: str = "POST", **headers: str) -> tuple[int, bytes]:
        """Status and body; a request that is not bytes is sent as JSON."""
        body = request if isinstance(request, bytes) or request is None else json.dumps(request).encode()
        with closing(self.connect()) as connection:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            response = connection.getresponse()
            return response.status, response.read()

    def answer(self, path: str, request: Any, **headers: str) -> bytes:
        status, body = self.request(path, request, **headers)
        assert status == 200, body
        return body


@contextmanager
def running(directory: Path, *arguments: str) -> Iterator[EngineProcess]:
    engine = EngineProcess(directory, *arguments)
    try:
        yield engine
    finally:
        engine.end()


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}
