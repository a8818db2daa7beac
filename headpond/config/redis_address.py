"""The address of Redis: one form for every client, its form for Celery, and the form that may be shown.

Accepted are the options that redis-py and Celery's transport both understand. TLS (`rediss://`) verifies the server's
certificate and host name in both, unless `ssl_cert_reqs` or `ssl_check_hostname` say otherwise.
"""

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from headpond.errors import ConfigError

VARIABLE = "HEADPOND_REDIS_URL"

SSL_OPTIONS = frozenset(
    {"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_cert_reqs"}
    | {"ssl_check_hostname", "ssl_ciphers"}
)
OPTIONS = frozenset({"db", "username", "password", "client_name"})
VERIFIED = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


def canonical(url: str) -> str:
    """`url` as redis-py reads it. ValueError unless redis-py and Celery can use it. The message omits the URL: it may
    hold a password."""
    if url.startswith("redis+socket://"):  # Celery's name of a unix socket
        url = "unix://" + url.removeprefix("redis+socket://").replace("virtual_host=", "db=")
    if not (_well_formed(url) and _connectable(url)):
        raise ValueError(
            "is not the address of a Redis: redis://HOST:PORT/NUMBER, rediss://HOST:PORT/NUMBER or unix:///PATH?db="
            f"NUMBER. Options: {', '.join(sorted(OPTIONS))}; with rediss also {', '.join(sorted(SSL_OPTIONS))}. "
            "Special characters in a password must be escaped (/ is %2F, # is %23, ? is %3F, @ is %40)"
        )
    return url


def from_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    """HEADPOND_REDIS_URL, for commands that have a run directory and no configuration."""
    url = environ.get(VARIABLE)
    try:
        return canonical(url) if url is not None else None
    except ValueError as error:
        raise ConfigError(f"environment, {VARIABLE}: {error}") from None


def celery_settings(url: str) -> dict[str, Any]:
    """Settings of a Celery app for the same server, user, database and certificates."""
    from redis.connection import parse_url

    options: dict[str, Any] = {"db": 0, **parse_url(url)}
    transport = {"client_name": options["client_name"]} if "client_name" in options else {}
    scheme = urlsplit(url).scheme
    login = ":".join(quote(options.get(name) or "", safe="") for name in ("username", "password"))
    login = f"{login}@" if login != ":" else ""
    if scheme == "unix":
        broker_url = f"redis+socket://{login}{quote(options['path'])}?virtual_host={options['db']}"
    else:
        host = options["host"] if ":" not in options["host"] else f"[{options['host']}]"
        broker_url = f"{scheme}://{login}{host}:{options.get('port', 6379)}/{options['db']}"
    ssl = {name: value for name, value in options.items() if name in SSL_OPTIONS}
    return {
        "broker_url": broker_url,
        "broker_use_ssl": VERIFIED | ssl if scheme == "rediss" else None,
        "broker_transport_options": transport,
    }


def address(url: str) -> str:
    """`url` without user name and password, for logs and files."""
    parts = urlsplit(url)
    options = [(name, value) for name, value in parse_qsl(parts.query) if not _is_secret(name)]
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"{shown}?{urlencode(options)}" if options else shown


def has_password(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.password) or any(name == "password" for name, _ in parse_qsl(parts.query))


def explain(url: str, error: Exception) -> str:
    """Why the Redis at `url` cannot be used, and what to do."""
    from redis.exceptions import AuthenticationError

    if isinstance(error, AuthenticationError):
        does = "refuses the password" if has_password(url) else "requires a password"
        return (
            f"Redis at {address(url)} {does}: set it in the environment, {VARIABLE}=redis://:PASSWORD@HOST:PORT/NUMBER"
        )
    return (
        f"Redis at {address(url)} cannot be used ({reason(error)}): "
        f"start it, or set redis_url ({VARIABLE}) to the right one"
    )


def reason(error: Exception) -> str:
    return str(error) or "timed out"  # a TimeoutError has no message


def _well_formed(url: str) -> bool:
    """redis-py reads a missing host as localhost and a database that is not a number as 0: both are typing errors."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    options = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    if not options <= (OPTIONS | SSL_OPTIONS if parts.scheme == "rediss" else OPTIONS):
        return False
    path = parts.path.strip("/")
    if parts.scheme == "unix":
        return bool(path) and not parts.hostname
    return bool(parts.hostname) and (not path or path.isdecimal())


def _connectable(url: str) -> bool:
    from redis import ConnectionPool, RedisError

    try:
        ConnectionPool.from_url(url).make_connection()
    except (ValueError, TypeError, RedisError):
        return False
    return True


def _is_secret(option: str) -> bool:
    return "password" in option or option == "username"
