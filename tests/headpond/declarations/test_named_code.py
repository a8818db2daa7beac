import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headpond.declarations.named_code import (
    NamedCode,
    check_here,
    check_in_child,
    checked_function,
    import_attribute,
    lookup,
)
from headpond.errors import ConfigError

CHECK = "own_checks:check"
MODULE = """
import os
print("noise on stdout")

def soft_rank(group):
    return group

threshold = 3
secret = os.environ.get("HEADPOND_ENGINE__API_KEY")
other = os.environ.get("OTHER")
"""
CHECKS = """
import os, own_rules
from headpond.errors import ConfigError
from headpond.declarations.named_code import import_attribute

def check(name, *, setting):
    found = import_attribute(name, setting=setting)
    if not callable(found):
        raise ConfigError(f"{setting} = {name!r} is not a function")
    return {"pid": os.getpid(), "secret": own_rules.secret, "other": own_rules.other}

def ends(name, *, setting):
    os.write(2, b"a library is missing")
    os._exit(7)

def waits(name, *, setting):
    import time
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in {"own_rules": MODULE, "own_checks": CHECKS, "stops": "raise SystemExit(3)"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "garbled.py").write_text("\na b\n")
    (tmp_path / "needs_garbled.py").write_text("import garbled")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "ranks.py").touch()
    (tmp_path / "own_package" / "needs.py").write_text("import own_package_2")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("own_rules", "own_checks", "stops", "own_package", "own_package.ranks"):
        sys.modules.pop(name, None)


def named(name: str, check: str = CHECK) -> NamedCode:
    return NamedCode(setting="advantages.estimator", name=name, check=check)


def test_an_unknown_name_is_refused_with_the_nearest_and_all_built_in_ones() -> None:
    assert lookup({"alpha": 1}, "alpha", setting="x") == 1
    with pytest.raises(ConfigError, match=r"x = 'alpa' is not built in; did you mean 'alpha'\? built in are: alpha, b"):
        lookup({"beta": 2, "alpha": 1}, "alpa", setting="x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_rules:soft_rnk", "module own_rules has no 'soft_rnk'; did you mean 'soft_rank'?"),
        ("own_rules:xyz", "module own_rules has no 'xyz'; check its spelling"),
        (
            "own_rulez:soft_rank",
            "cannot be imported: No module named 'own_rulez'; install it where this process runs, or",
        ),
        ("stops:a", "cannot be imported: SystemExit: 3 ("),
        ("garbled:a", "cannot be imported: SyntaxError: invalid syntax (garbled.py, line 2)"),
        ("needs_garbled:a", "cannot be imported: SyntaxError: invalid syntax (garbled.py, line 2)"),
        ("own_rules:", "write it as module:attribute"),
        ("own_rules", "write it as module:attribute"),
        ("own_package.rank:soft", "own_package has no module 'rank'; did you mean 'ranks'?"),
        ("own_package.xyz.more:soft", "own_package has no module 'xyz'; check its spelling"),
        ("own_package.ranks.more:soft", "'own_package.ranks' is not a package; install it"),
        ("own_package.needs:soft", "No module named 'own_package_2'; install it"),
        ("own_package/ranks.py:soft", "write it as own_package.ranks:soft"),
        ("./own_package/ranks:soft", "write it as own_package.ranks:soft"),
        ("/home/me/ranks.py:soft", "write it as ranks:soft"),
        ("ranks.py:", "write it as ranks:attribute"),
    ],
)
def test_code_that_cannot_be_imported_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        import_attribute(name, setting="x")
    assert f"x = {name!r}" in str(refused.value)
    assert message in str(refused.value)
    assert "importlib" not in str(refused.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, r"it is a int: it must be a function of \(group\)"),
        (lambda: 0, r"it takes \(\): it must be a function of \(group\)"),
        (lambda a, b: 0, r"it takes \(a, b\): it must"),
        (lambda *, group: 0, r"it takes \(\*, group\): it must"),
    ],
)
def test_a_wrong_signature_is_refused(function: Callable[..., int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_function(function, "group", what="it")
    for right in (lambda group: 0, lambda group, size=3: 0, lambda *values: 0, len):
        assert checked_function(right, "group", what="it") is right


def test_a_child_checks_code_without_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADPOND_ENGINE__API_KEY", "hunter2")
    monkeypatch.setenv("OTHER", "kept")
    facts = check_in_child([named("own_rules:soft_rank")])["advantages.estimator"]
    here = check_here([named("own_rules:soft_rank")])["advantages.estimator"]
    assert (facts["secret"], facts["other"]) == (None, "kept")
    assert here["secret"] == "hunter2"
    assert facts["pid"] != here["pid"]


@pytest.mark.parametrize("check", [check_here, check_in_child])
def test_every_problem_is_listed(check: Callable[[list[NamedCode]], object]) -> None:
    with pytest.raises(ConfigError) as refused:
        check([named("own_rules:soft_rnk"), named("own_rules:soft_rank"), named("own_rules:threshold")])
    first, second = str(refused.value).splitlines()
    assert "did you mean 'soft_rank'?" in first
    assert second == "advantages.estimator = 'own_rules:threshold' is not a function"


def test_a_child_that_ends_or_hangs_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"'own_rules:a': .*ended with 7: (.|\n)*a library is"):
        check_in_child([named("own_rules:a", "own_checks:ends")])
    with pytest.raises(ConfigError, match=r"'own_rules:a': .*longer than 1 s"):
        check_in_child([named("own_rules:a", "own_checks:waits")], timeout_s=1.0)
