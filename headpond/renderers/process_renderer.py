"""A renderer in a child process (`renderer_child.py`).

Reading a tokenizer's file holds the GIL, and a chat template is Python: in a thread, both would
block the loop. Encoding and decoding have a pipe each, so that neither waits for the other. A
child that dies or hangs is replaced.
"""

import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from headpond.errors import BadRequest, HeadpondError, InfrastructureFailure
from headpond.processes import privacy
from headpond.renderers.protocol import NO_IDS, NO_VALUES, TemplateValues, Tools
from headpond.turn import Ids, Message

# Building takes 0.3-4 s, encoding a million tokens about 3 s. A child that takes longer than these
# limits hangs.
BUILD_TIMEOUT_S, CALL_TIMEOUT_S = 300.0, 60.0
# Calls are pure functions: a call whose child died is repeated.
ATTEMPTS = 2


class ChildGone(Exception):
    """Raised when the child process died or hangs."""


# `Tokenizer.from_file` held the GIL for 2-4 s with 150,000 tokens. A call to the child costs 0.9
# ms.
class ProcessRenderer:
    """A renderer whose calls run in its child. The keyword arguments are those of
    `renderer_child.build`."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._starting = threading.Lock()
        self._child = Child(arguments)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        generate: bool = True,
        values: TemplateValues = NO_VALUES,
    ) -> Ids:
        return self._call("encoding", "render", list(messages), tools=tools, generate=generate, values=dict(values))

    def bridge(
        self,
        prompt_ids: Ids,
        completion_ids: Ids,
        new_messages: Sequence[Message],
        *,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> Ids | None:
        turn = (prompt_ids, completion_ids, list(new_messages))
        return self._call("encoding", "bridge", *turn, tools=tools, values=dict(values))

    def message(
        self,
        completion_ids: Ids,
        *,
        prompt_ids: Ids = NO_IDS,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> dict[str, Any]:
        more = {"prompt_ids": prompt_ids, "tools": tools, "values": dict(values)}
        return self._call("decoding", "message", completion_ids, **more)

    def texts(self, ids: Ids) -> list[str]:
        return self._call("decoding", "texts", ids)

    @property
    def pid(self) -> int:
        return self._child.pid

    def _call(self, channel: str, *request: Any, **more: Any) -> Any:
        for _ in range(ATTEMPTS):
            child = self._running_child()
            try:
                return child.call(channel, (*request, more), timeout_s=CALL_TIMEOUT_S)
            except ChildGone:
                child.end()
        raise InfrastructureFailure(
            f"the process of the renderer of {self._arguments['model']} died or hung {ATTEMPTS} times in one call: "
            "check whether the machine is out of memory, and this process's stderr for its last output"
        )

    def _running_child(self) -> "Child":
        with self._starting:
            if not self._child.is_running:
                self._child = Child(self._arguments)
            return self._child


class Child:
    """One child process. It ends when this object is collected, or when its parent ends and its
    pipes close."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        pairs = {name: socket.socketpair() for name in ("encoding", "decoding")}
        self._pipes = {name: Connection(ours.detach()) for name, (ours, _) in pairs.items()}
        self._locks = {name: threading.Lock() for name in pairs}
        child_sockets = [child_socket for _, child_socket in pairs.values()]
        descriptors = [child_socket.fileno() for child_socket in child_sockets]
        # A process group of its own: Ctrl-C reaches only the parent. It encodes one text at a time
        # and needs no parallelism.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headpond.renderers.renderer_child", *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            env={**privacy.inherited_variables(), "TOKENIZERS_PARALLELISM": "false"},
            process_group=0,
        )
        for child_socket in child_sockets:
            child_socket.close()
        # Garbage collection closes the pipes. An explicit close could hit another thread that reads
        # them.
        self.end = weakref.finalize(self, _end, self._process)
        # The pipes close with this process, and no thread can be started then.
        self.end.atexit = False
        try:
            self.call("encoding", arguments, timeout_s=BUILD_TIMEOUT_S)
        except ChildGone as error:
            self.end()
            raise InfrastructureFailure(
                f"the process that builds the renderer of {arguments['model']} died or hung; see this process's stderr "
                "for its last output"
            ) from error
        except HeadpondError:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self.end.alive and self._process.poll() is None

    def call(self, channel: str, request: object, *, timeout_s: float) -> Any:
        pipe = self._pipes[channel]
        with self._locks[channel]:
            try:
                pipe.send(request)
                if not pipe.poll(timeout_s):
                    raise ChildGone
                response = pipe.recv()
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise BadRequest(f"the messages or tools cannot be pickled: {error}") from error
            except (EOFError, OSError) as error:
                raise ChildGone from error
        if isinstance(response, HeadpondError):
            raise response
        return response


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and wait in a thread: a process with a tokenizer takes about 8 ms to end,
    and the loop may be the caller."""
    process.kill()  # The process has nothing to clean up.
    threading.Thread(target=process.wait, daemon=True).start()
