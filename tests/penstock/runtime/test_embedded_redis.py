import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.waiting import wait_until

from penstock.errors import ConfigError, RunError
from penstock.runtime.embedded_redis import EmbeddedRedis, find_server
from penstock.runtime.launcher import LAUNCHER


def client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


def test_serves_on_loopback_with_an_append_only_file_and_never_evicts(server: EmbeddedRedis) -> None:
    config = client(server).config_get("*")
    assert config["bind"] == "127.0.0.1"
    assert (config["appendonly"], config["appendfsync"], config["save"]) == ("yes", "everysec", "")
    assert config["maxmemory-policy"] == "noeviction"
    assert config["dir"] == str(server.directory)


def test_two_servers_choose_different_ports_outside_the_ephemeral_range(server: EmbeddedRedis, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "other") as other:
        assert other.port != server.port
        assert max(other.port, server.port) < 32_768


def test_stops_in_order_and_leaves_no_process(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        pid = server.pid
    assert gone(pid)
    assert not server.running
    assert "ready to exit" in server.log_path.read_text()


def test_a_stopped_process_is_killed_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.embedded_redis.STOP_TIMEOUT_S", 0.1)
    server = EmbeddedRedis(tmp_path)
    server.start()
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert gone(server.pid)


@pytest.mark.parametrize("kill", [EmbeddedRedis.kill, lambda server: os.kill(server.pid, signal.SIGKILL)])
@pytest.mark.parametrize(("appendonly", "kept"), [(True, "value"), (False, None)])
def test_restarts_after_a_kill_on_the_same_port(tmp_path: Path, kill, appendonly: bool, kept: str | None) -> None:
    with EmbeddedRedis(tmp_path, appendonly=appendonly) as server:
        url, pid, connection = server.url, server.pid, client(server)
        connection.set("key", "value")
        kill(server)
        server.restart()
        assert server.pid != pid
        assert server.url == url
        assert connection.get("key") == kept


def test_restarts_a_server_that_still_runs(server: EmbeddedRedis) -> None:
    pid = server.pid
    server.restart()
    assert gone(pid)
    assert client(server).ping()


def test_has_neither_port_nor_process_before_it_was_started(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.stop()
    for attribute in ("url", "port", "pid"):
        with pytest.raises(RunError, match=r"call start\(\)"):
            getattr(server, attribute)


def test_start_does_nothing_while_the_server_runs(server: EmbeddedRedis) -> None:
    pid = server.pid
    server.start()
    assert server.pid == pid


def test_a_directory_and_a_password_with_special_characters(tmp_path: Path) -> None:
    password = 'a "b\\ #c:/@é\n'
    with EmbeddedRedis(tmp_path / 'run "one" #1', password=password) as server:
        assert client(server).config_get("dir")["dir"] == str(server.directory)
        assert client(server).config_get("requirepass")["requirepass"] == password


def test_a_password_is_required_and_no_process_list_shows_it(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, password="s3cret-word") as server:
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)).ping()
        assert client(server).ping()
        for name in ("cmdline", "environ"):
            assert b"s3cret-word" not in Path(f"/proc/{server.pid}/{name}").read_bytes()
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cret-word" in path.read_bytes()]


PARENT = """
import sys, threading
from pathlib import Path
from penstock.runtime.embedded_redis import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1]))
server.start()
print(server.pid, server.port, flush=True)
threading.Event().wait()
"""


def test_ends_with_its_parent_even_after_a_sigkill(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], stdout=subprocess.PIPE, text=True) as parent:
        pid, port = (int(word) for word in parent.stdout.readline().split())
        assert redis.Redis(port=port).set("key", "value")
        parent.kill()
        wait_until(lambda: gone(pid), what="the server ends with its parent")
    with EmbeddedRedis(tmp_path) as successor:
        assert client(successor).get("key") == "value"


def test_a_parent_that_died_before_the_server_was_ready_leaves_nothing(tmp_path: Path) -> None:
    """The launcher is given a parent id that is not its parent's, as it finds when that one has just died."""
    command = [sys.executable, "-I", "-S", "-c", LAUNCHER, "1", str(find_server()), "-"]
    launched = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert launched.returncode == 1
    assert "the parent ended" in launched.stderr


def test_a_given_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"another process has taken 127.0.0.1:{port}"):
            EmbeddedRedis(tmp_path, port=port).start()


def test_another_redis_on_the_port_is_not_mistaken_for_this_one(server: EmbeddedRedis, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another process has taken"):
        EmbeddedRedis(tmp_path / "other", port=server.port).start()


def test_a_chosen_port_that_is_taken_is_left_for_another(
    server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [server.port, server.port, server.port + 1]
    monkeypatch.setattr("penstock.runtime.embedded_redis.system_random.sample", lambda *_: chosen)
    with EmbeddedRedis(tmp_path / "other") as other:
        assert other.port == server.port + 1


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Cannot keep .* files in .*/file: .* Use another directory"):
        EmbeddedRedis(tmp_path / "file").start()


def test_a_second_server_on_the_same_directory_is_refused(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.embedded_redis.STOP_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match="Another Redis server runs in"):
        EmbeddedRedis(server.directory).start()


def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        client(server).set("key", "value")
    for path in tmp_path.rglob("appendonly.aof*"):
        path.write_text("no append-only file at all")
    with pytest.raises(RunError, match=r"(?is)ended while it started.*redis\.log:.*(AOF|append only)"):
        server.start()
    assert not server.running


def test_only_the_main_thread_may_start_it(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            EmbeddedRedis(tmp_path).start()
        except RunError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_prefers_redis_server_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis-server").symlink_to(find_server())
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_server() == tmp_path / "redis-server"


def test_says_what_to_install_when_there_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="apt install redis-server"):
        find_server()
