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

from headpond.errors import ConfigError, RunError
from headpond.processes.child_programs import LAUNCHER
from headpond.processes.embedded_redis import EmbeddedRedis, find_server


def client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


def test_it_binds_to_loopback_with_an_append_only_file_and_no_eviction(server: EmbeddedRedis) -> None:
    config = client(server).config_get("*")
    assert config["bind"] == "127.0.0.1"
    assert (config["appendonly"], config["appendfsync"], config["save"]) == ("yes", "everysec", "")
    assert config["maxmemory-policy"] == "noeviction"
    assert config["dir"] == str(server.directory)


def test_two_servers_choose_different_ports_outside_the_ephemeral_range(server: EmbeddedRedis, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "other") as other:
        assert other.port != server.port
        assert max(other.port, server.port) < 32_768


def test_it_stops_cleanly_and_leaves_no_process(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        pid = server.pid
    assert has_ended(pid)
    assert not server.running
    assert "ready to exit" in server.log_path.read_text()


def test_a_suspended_server_is_killed_after_the_stop_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headpond.processes.embedded_redis.STOP_TIMEOUT_S", 0.1)
    server = EmbeddedRedis(tmp_path)
    server.start()
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert has_ended(server.pid)


@pytest.mark.parametrize("kill", [EmbeddedRedis.kill, lambda server: os.kill(server.pid, signal.SIGKILL)])
@pytest.mark.parametrize(("appendonly", "kept"), [(True, "value"), (False, None)])
def test_it_restarts_on_the_same_port_after_a_kill(tmp_path: Path, kill, appendonly: bool, kept: str | None) -> None:
    with EmbeddedRedis(tmp_path, appendonly=appendonly) as server:
        url, pid, connection = server.url, server.pid, client(server)
        connection.set("key", "value")
        kill(server)
        server.restart()
        assert server.pid != pid
        assert server.url == url
        assert connection.get("key") == kept


def test_restart_kills_a_running_server_first(server: EmbeddedRedis) -> None:
    pid = server.pid
    server.restart()
    assert has_ended(pid)
    assert client(server).ping()


def test_it_has_no_port_and_no_process_before_its_start(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.stop()
    for attribute in ("url", "port", "pid"):
        with pytest.raises(RunError, match=r"call start\(\)"):
            getattr(server, attribute)


def test_start_does_nothing_while_the_server_runs(server: EmbeddedRedis) -> None:
    pid = server.pid
    server.start()
    assert server.pid == pid


def test_directory_and_password_may_have_special_characters(tmp_path: Path) -> None:
    password = 'a "b\\ #c:/@é\n'
    with EmbeddedRedis(tmp_path / 'run "one" #1', password=password) as server:
        assert client(server).config_get("dir")["dir"] == str(server.directory)
        assert client(server).config_get("requirepass")["requirepass"] == password


def test_a_password_is_required_and_visible_in_no_process_or_file(tmp_path: Path) -> None:
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
from headpond.processes.embedded_redis import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1]))
server.start()
print(server.pid, server.port, flush=True)
threading.Event().wait()
"""


def test_it_ends_with_a_killed_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], stdout=subprocess.PIPE, text=True) as parent:
        pid, port = (int(word) for word in parent.stdout.readline().split())
        assert redis.Redis(port=port).set("key", "value")
        parent.kill()
        wait_until(lambda: has_ended(pid), what="the server ends with its parent")
    with EmbeddedRedis(tmp_path) as successor:
        assert client(successor).get("key") == "value"


def test_the_launcher_exits_if_its_parent_has_already_ended(tmp_path: Path) -> None:
    """The launcher gets an id that is not its parent's, as if the parent had just died."""
    command = [sys.executable, "-I", "-S", "-c", LAUNCHER, "1", str(find_server()), "-"]
    launched = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert launched.returncode == 1
    assert "the parent ended" in launched.stderr


def test_the_error_names_a_configured_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"another process has taken 127.0.0.1:{port}"):
            EmbeddedRedis(tmp_path, port=port).start()


def test_another_redis_on_the_port_is_not_mistaken_for_this_one(server: EmbeddedRedis, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another process has taken"):
        EmbeddedRedis(tmp_path / "other", port=server.port).start()


def test_another_port_is_chosen_if_the_first_is_taken(
    server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [server.port, server.port, server.port + 1]
    monkeypatch.setattr("headpond.processes.embedded_redis.system_random.sample", lambda *_: chosen)
    with EmbeddedRedis(tmp_path / "other") as other:
        assert other.port == server.port + 1


def test_the_error_names_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"files in .*/file: "):
        EmbeddedRedis(tmp_path / "file").start()


def test_a_second_server_on_the_same_directory_is_refused(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headpond.processes.embedded_redis.STOP_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match="Another Redis server runs in"):
        EmbeddedRedis(server.directory).start()


def test_the_error_of_a_failed_start_has_the_end_of_the_log(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        client(server).set("key", "value")
    for path in tmp_path.rglob("appendonly.aof*"):
        path.write_text("no append-only file at all")
    with pytest.raises(RunError, match=r"(?is)ended before it answered.*redis\.log:.*(AOF|append only)"):
        server.start()
    assert not server.running


def test_it_can_only_be_started_from_the_main_thread(tmp_path: Path) -> None:
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


def test_redis_server_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis-server").symlink_to(find_server())
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_server() == tmp_path / "redis-server"


def test_a_missing_server_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="apt install redis-server"):
        find_server()
