"""A renderer that lives in a process of its own: `served.py` is the other end.

Reading a tokenizer's file holds the GIL for its whole time, and a template is Python: in a thread, both would stop the
loop. Encoding and decoding have a pipe each, so that neither waits for the other. A process that dies or hangs is
replaced at the next call.
"""

import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from penstock.errors import BadRequest, InfrastructureFailure, PenstockError
from penstock.renderers.protocol import NO_IDS, Tools
from penstock.turn import Ids, Message

# Building takes 0.3-4 s, encoding a million tokens some 3 s: past these, a process hangs.
BUILD_S, ANSWER_S = 300.0, 60.0
# A call is a pure function: where the process died under it, it is made once more.
TRIES = 2


class Gone(Exception):
    """The process died, or does not answer."""


class ProcessRenderer:
    """`what` is the keyword arguments of `served.build`."""

    def __init__(self, **what: Any) -> None:
        self._what = what
        self._starting = threading.Lock()
        self._child = Child(what)

    def render(self, messages: Sequence[Message], *, tools: Tools = None, generate: bool = True) -> Ids:
        return self._ask("encoding", "render", list(messages), tools=tools, generate=generate)

    def bridge(
        self, prompt_ids: Ids, completion_ids: Ids, new_messages: Sequence[Message], *, tools: Tools = None
    ) -> Ids | None:
        return self._ask("encoding", "bridge", prompt_ids, completion_ids, list(new_messages), tools=tools)

    def message(self, completion_ids: Ids, *, prompt_ids: Ids = NO_IDS, tools: Tools = None) -> dict[str, Any]:
        return self._ask("decoding", "message", completion_ids, prompt_ids=prompt_ids, tools=tools)

    @property
    def pid(self) -> int:
        return self._child.pid

    def _ask(self, channel: str, *call: Any, **more: Any) -> Any:
        for _ in range(TRIES):
            child = self._living()
            try:
                return child.ask(channel, (*call, more), timeout_s=ANSWER_S)
            except Gone:
                child.end()
        raise InfrastructureFailure(
            f"the process of the renderer of {self._what['model']} died or hung {TRIES} times at one call: is there "
            "memory left? Its last words are in this process's stderr"
        )

    def _living(self) -> "Child":
        with self._starting:
            if not self._child.is_living:
                self._child = Child(self._what)
            return self._child


class Child:
    """One process. It ends when this object does, or when its parent is no more: its pipes end then."""

    def __init__(self, what: dict[str, Any]) -> None:
        pairs = {name: socket.socketpair() for name in ("encoding", "decoding")}
        self._pipes = {name: Connection(ours.detach()) for name, (ours, _) in pairs.items()}
        self._locks = {name: threading.Lock() for name in pairs}
        theirs = [its for _, its in pairs.values()]
        numbers = [its.fileno() for its in theirs]
        # A process group: Ctrl-C is for its parent. One text at a time needs no threads of the package's own.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.renderers.renderer_child", *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=numbers,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            process_group=0,
        )
        for its in theirs:
            its.close()
        # Pipes are left to the collector: closed here, they could be closed under another thread that reads them.
        self.end = weakref.finalize(self, _end, self._process)
        self.end.atexit = False  # pipes end with us, and no thread can be started then
        try:
            self.ask("encoding", what, timeout_s=BUILD_S)
        except Gone as error:
            self.end()
            raise InfrastructureFailure(
                f"the process that builds the renderer of {what['model']} died or hung; its last words are in this "
                "process's stderr"
            ) from error
        except PenstockError:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_living(self) -> bool:
        return self.end.alive and self._process.poll() is None

    def ask(self, channel: str, request: object, *, timeout_s: float) -> Any:
        pipe = self._pipes[channel]
        with self._locks[channel]:
            try:
                pipe.send(request)
                if not pipe.poll(timeout_s):
                    raise Gone
                answer = pipe.recv()
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise BadRequest(f"the messages or tools hold what cannot be sent: {error}") from error
            except (EOFError, OSError) as error:
                raise Gone from error
        if isinstance(answer, PenstockError):
            raise answer
        return answer


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Who drops a renderer may be the loop: a process with a tokenizer takes some 8 ms to end."""
    process.kill()  # it has nothing to put away
    threading.Thread(target=process.wait, daemon=True).start()
