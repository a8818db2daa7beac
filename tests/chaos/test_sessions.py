"""A session server is killed at random turns and started again on its port; agents continue their sessions.

`make chaos` plays 200 sessions; the test run plays a few.
"""

import http.client
import random
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.session_process import Agent, SessionsProcess, running, scripted
from support.stores import directory_store, timeless_checksum
from support.upstream import user
from support.waiting import wait_until

from headpond.store import BlobRef

TURNS = 5
THREADS = 16
BROKEN = (ConnectionError, http.client.HTTPException, TimeoutError)


class Server:
    """Always on the same port; `kill` is SIGKILL and a new process."""

    def __init__(self, directory: Path, backend: str, arguments: list[str]) -> None:
        self._directory, self._backend, self._arguments = directory, backend, arguments
        self.process = SessionsProcess(directory, backend, *arguments)
        self._arguments += ["--port", str(self.process.address[1])]
        self.killed = 0

    def kill(self) -> None:
        self.process.kill()
        self.killed += 1
        self.process = SessionsProcess(self._directory, self._backend, *self._arguments)
        assert self.process.address


def play(server: Server, number: int, progress: list[int]) -> Agent:
    agent = begin(server, number)
    while (turn := len(agent.messages) // 2) < TURNS:
        agent.server = server.process
        try:
            agent.talk(f"session {number}, turn {turn}" + "." * (number * 37 % 200))
        except BROKEN:
            recover_turns(agent, server)
        progress.append(number)
    return agent


def begin(server: Server, number: int) -> Agent:
    """Create a session, and another if there is no response: the first is then unused and expires."""

    def created() -> Agent | None:
        try:
            return server.process.agent(rollout=f"r{number}", attempt=1)
        except BROKEN:
            return None

    agent = wait_until(created)
    assert agent
    return agent


def recover_turns(agent: Agent, server: Server) -> None:
    """Append recorded turns whose response the agent did not receive."""

    def recorded() -> list[list[dict[str, Any]]]:
        """The records in a list of their own, which is true even if there are none yet."""
        agent.server = server.process
        try:
            return [agent.request("GET").json["records"]]
        except BROKEN:
            return []

    [records] = wait_until(recorded)
    messages = agent.messages
    for record in records[len(messages) // 2 :]:
        messages += [user(record["request"]["messages"][-1]["content"])]
        messages += [record["response"]["choices"][0]["message"]]
    assert len(messages) // 2 == len(records)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["open", "linear"])
def test_a_restarted_server_recovers_every_turn(request: pytest.FixtureRequest, tmp_path: Path, mode: str) -> None:
    rounds = min(20, request.config.getoption("--chaos-rounds"))
    sessions, kills, seeded = 10 * rounds, 1 + rounds // 4, random.Random(rounds)
    instance = ["--instance-id", "cd" * 16, "--mode", mode]
    progress: list[int] = []
    with scripted() as script, ThreadPoolExecutor(THREADS) as pool:
        server = Server(tmp_path, script.server.url, instance)
        try:
            playing = [pool.submit(play, server, number, progress) for number in range(sessions)]
            total = sessions * TURNS
            for at in sorted(seeded.sample(range(total // 10, total * 9 // 10), kills)):
                wait_until(lambda at=at: len(progress) >= at or failed(playing))
                server.kill()
            agents = [each.result() for each in playing]
            server.kill()
            for agent in agents:
                agent.server = server.process
            sealed = [agent.request("POST", "/seal").json for agent in agents]
            assert server.killed == kills + 1
        finally:
            server.process.end()
        compare(tmp_path, script.server.url, ["--mode", mode], sealed)


def failed(playing: list[Future[Agent]]) -> bool:
    return any(each.done() and each.exception() for each in playing)


def compare(directory: Path, backend: str, arguments: list[str], sealed: list[Any]) -> None:
    """Compare tokens, logprobs, masks and rows with those of a server that was not killed. A last answer that was given
    less than 20 ms before the kill may count as unseen: its mask is 0 then."""
    assert sum(each["metrics"]["unseen_turns"] for each in sealed) <= THREADS
    with running(directory, backend, *arguments, store="undisturbed") as process:
        for number, recovered in enumerate(sealed):
            agent = process.agent(rollout=f"r{number}", attempt=1)
            for turn in range(TURNS):
                agent.talk(f"session {number}, turn {turn}" + "." * (number * 37 % 200))
            expected = agent.request("POST", "/seal").json
            for file in ("columns", "experts"):
                assert recovered[file]["key"] != expected[file]["key"]
            for each, store in ((recovered, directory / "store"), (expected, process.store)):
                each["columns"] = timeless_checksum(directory_store(store), BlobRef(**each["columns"]), seen=True)
                each["metrics"].pop("engine_s")
                each["experts"].pop("key")
                each.pop("replica_uses")  # of one process
            assert recovered["metrics"].pop("unseen_turns") - expected["metrics"].pop("unseen_turns") in (0, 1)
            assert recovered == expected
