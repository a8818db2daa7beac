"""The address of Redis: validation, and the form without credentials that may be shown."""

from urllib.parse import parse_qsl, urlencode, urlsplit


def check(url: str) -> None:
    """Raise ValueError unless redis-py and Celery can use `url`. The message omits it: it may hold a password."""
    if not (_well_formed(url) and _connectable(url)):
        raise ValueError(
            "is not the address of a Redis: redis://HOST:PORT/NUMBER, rediss://HOST:PORT/NUMBER or unix:///PATH, each "
            "with ?OPTION=VALUE of redis-py's connections; special characters in a password must be escaped "
            "(/ is %2F, # is %23, ? is %3F, @ is %40)"
        )


def _well_formed(url: str) -> bool:
    """redis-py reads a missing host as localhost and a database that is not a number as 0: both are typing errors."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    path = parts.path.strip("/")
    if parts.scheme == "unix":
        return bool(path)
    return bool(parts.hostname) and (not path or path.isdecimal())


def _connectable(url: str) -> bool:
    from redis import ConnectionPool

    try:
        ConnectionPool.from_url(url).make_connection()
    except (ValueError, TypeError):  # TypeError for an unknown option
        return False
    return True


def address(url: str) -> str:
    """`url` without user name and password, for logs and files."""
    parts = urlsplit(url)
    options = [(name, value) for name, value in parse_qsl(parts.query) if not _is_secret(name)]
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"{shown}?{urlencode(options)}" if options else shown


def has_password(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.password) or any(name == "password" for name, _ in parse_qsl(parts.query))


def _is_secret(option: str) -> bool:
    return "password" in option or option == "username"
