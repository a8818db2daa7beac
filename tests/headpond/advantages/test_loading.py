import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headpond.advantages.settings import check_estimator, check_shaping, load_estimator
from headpond.errors import ConfigError

MODULE = """
from headpond.advantages import Estimator

def plain(group):
    return group.rewards

def whiten(batch):
    return batch.values

def with_state(batch, state):
    return batch.values, state

both = Estimator(group=plain, batch=whiten)
stateful = Estimator(group=plain, batch=with_state, state={}, needs_variance=False)
needs_a_state = Estimator(group=plain, batch=with_state)
has_no_batch_phase = Estimator(group=plain, state={})
wrong_group = Estimator(group=with_state)
number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_estimators.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_estimators", None)


def test_a_function_is_an_estimator_without_a_batch_phase() -> None:
    loaded = load_estimator("own_estimators:plain")
    assert (loaded.batch, loaded.needs_variance, loaded.state) == (None, True, None)
    assert check_shaping("own_estimators:plain", setting="x") == {}


@pytest.mark.parametrize(("name", "batch_phase"), [("plain", False), ("both", True), ("stateful", True)])
def test_the_check_tells_whether_there_is_a_batch_phase(name: str, batch_phase: bool) -> None:
    assert check_estimator(f"own_estimators:{name}", setting="x") == {"batch_phase": batch_phase}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("with_state", r"takes \(batch, state\): it must be a function of \(group\)"),
        (
            "needs_a_state",
            r"`batch` takes .*: it must be a function of \(batch\), or give the Estimator a `state`",
        ),
        ("has_no_batch_phase", r"has a state and no batch phase: set `batch`"),
        ("wrong_group", r"`group` takes \(batch, state\): it must be a function of \(group\)"),
        ("number", r"is a int: it must be a function of \(group\)"),
        ("plan", r"module own_estimators has no 'plan'; did you mean 'plain'\?"),
    ],
)
def test_a_wrong_estimator_is_refused_with_its_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"x = 'own_estimators:{name}'.*{message}"):
        check_estimator(f"own_estimators:{name}", setting="x")
