import pytest

from headpond.config.redis_address import address, canonical, celery_settings, has_password


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://localhost",
        "redis://[::1]:6379/2",
        "redis://:p%2Fss@redis:6379/0",
        "rediss://ada:secret@redis.example:6380/1?ssl_cert_reqs=required",
        "unix:///run/redis.sock?db=2",
    ],
)
def test_a_valid_address_is_accepted(url: str) -> None:
    assert canonical(url) == url


def test_the_unix_socket_of_celery_is_that_of_redis() -> None:
    url = "redis+socket://ada:x@/run/redis.sock?virtual_host=2"
    assert canonical(url) == "unix://ada:x@/run/redis.sock?db=2"
    assert celery_settings(canonical(url))["broker_url"] == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://localhost:6379/0",
        "redis://",
        "redis://host:port/0",
        "redis://host:99999/0",
        "redis://host:6379/zero",
        "redis://[::1/0",
        "redis://:hunter2/x@host:6379/0",
        "redis://:hunter2#x@host:6379/0",
        "redis://:hunter2@host:6379/0?tiemout=3",
        "redis://:hunter2@host:6379/0?socket_timeout=3",
        "redis://:hunter2@host:6379/0?ssl_ca_certs=/ca.pem",
        "rediss://:hunter2@host:6379/0?ssl_cert_reqs=sometimes",
        "unix://",
        "unix://run/redis.sock",
        "redis+socket://",
    ],
)
def test_a_wrong_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="redis://HOST:PORT/NUMBER") as refusal:
        canonical(url)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://ada:hunter2@h:6379/0", "redis://h:6379/0"),
        ("redis://:hunt@er2@h:6379/0", "redis://h:6379/0"),
        ("redis://h:6379/0?password=hunter2&username=ada", "redis://h:6379/0"),
        ("rediss://:hunter2@h/1?ssl_password=x&ssl_cert_reqs=none", "rediss://h/1?ssl_cert_reqs=none"),
        ("unix:///run/redis.sock?db=2&password=hunter2", "unix:///run/redis.sock?db=2"),
    ],
)
def test_the_shown_address_has_neither_user_nor_password(url: str, shown: str) -> None:
    assert address(url) == shown


@pytest.mark.parametrize(
    ("url", "has"),
    [("redis://h/0", False), ("redis://:x@h/0", True), ("redis://h/0?password=x", True), ("redis://ada@h/0", False)],
)
def test_a_password_in_an_address_is_detected(url: str, has: bool) -> None:
    assert has_password(url) is has
