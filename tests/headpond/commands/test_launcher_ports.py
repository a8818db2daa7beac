import socket
from pathlib import Path

import pytest

from headpond.commands.launcher.ports import kept_port
from headpond.processes.embedded_redis import HOST, PORTS


def test_the_port_of_the_last_start_is_taken_again_while_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.port"
    first = kept_port(path)
    assert kept_port(path) == first
    with socket.create_server((HOST, first)):
        other = kept_port(path)
    assert other != first
    assert kept_port(path) == other


@pytest.mark.parametrize("content", ["", "not a port", "80", "99999999"])
def test_a_file_that_names_no_port_of_ours_is_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "dashboard.port"
    path.write_text(content)
    port = kept_port(path)
    assert port in PORTS
    assert kept_port(path) == port
