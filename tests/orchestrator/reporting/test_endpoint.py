import socket

import pytest

from headpond.config import Http
from headpond.errors import ConfigError
from headpond.orchestrator.reporting.endpoint import listening, url


def test_the_default_is_any_free_port_on_the_loopback_address() -> None:
    with listening(Http()) as listener:
        assert listener is not None
        port = listener.getsockname()[1]
        assert port > 0
        assert url(listener) == f"http://127.0.0.1:{port}"


def test_a_port_that_is_taken_is_refused_with_what_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"cannot listen on 127.0.0.1, port {port}: Address already in use\. Set http\.port to another port"
        with pytest.raises(ConfigError, match=message), listening(Http(port=port)):
            pass


def test_an_address_of_another_machine_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"http\.host "),
        listening(Http(host="192.0.2.1")),
    ):
        pass


def test_an_unknown_host_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot listen on no\.such\.invalid"),
        listening(Http(host="no.such.invalid")),
    ):
        pass


def test_the_url_of_all_addresses_names_the_machine() -> None:
    with listening(Http(host="0.0.0.0")) as listener:
        assert listener is not None
        assert url(listener) == f"http://{socket.gethostname()}:{listener.getsockname()[1]}"


def test_an_ipv6_address_is_put_in_brackets() -> None:
    with listening(Http(host="::1")) as listener:
        assert listener is not None
        assert url(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_port_off_does_not_listen() -> None:
    with listening(Http(port="off")) as listener:
        assert listener is None
        assert url(listener) is None
