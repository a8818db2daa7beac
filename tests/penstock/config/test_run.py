from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock import config
from penstock.config import Rollouts, RunConfig
from penstock.config.problems import all_keys, line_of
from penstock.errors import ConfigError


def loaded(tmp_path: Path, text: str = "", *, flags: dict[str, Any] | None = None, **environ: str) -> RunConfig:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    return config.load(path, flags=flags, environ=environ)


def refused(tmp_path: Path, text: str = "", *, flags: dict[str, Any] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        loaded(tmp_path, text, flags=flags, **environ)
    return str(refusal.value).replace(f"{tmp_path}/", "")


def test_the_defaults_are_enough() -> None:
    assert config.load(None, environ={}) == RunConfig()


def test_flags_go_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    text = 'steps = 1\nseed = 1\nstore = "file:///from/file"\n[recovery]\nlease_s = 1.5\nmax_losses = 7\n'
    environ = {"PENSTOCK_STEPS": "2", "PENSTOCK_SEED": "2", "PENSTOCK_RECOVERY__LEASE_S": "2.5", "HOME": "/root"}
    found = loaded(tmp_path, text, flags={"steps": 3, "run_dir": None}, **environ)
    assert (found.steps, found.seed, found.store) == (3, 2, "file:///from/file")
    assert (found.recovery.lease_s, found.recovery.max_losses) == (2.5, 7)
    assert found.run_dir == RunConfig().run_dir


def test_a_variable_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("steps = 4")
    assert config.load(None, environ={"PENSTOCK_CONFIG": str(path)}).steps == 4


WRONG = {
    "stpes = 3": "line 1: there is no setting 'stpes'; the nearest is 'steps'",
    "\n[recovery]\n\nleese_s = 3": "line 4: there is no setting 'recovery.leese_s'; the nearest is 'recovery.lease_s'",
    "lease_s = 3": "line 1: there is no setting 'lease_s'; the nearest is 'recovery.lease_s'",
    "recovery.leese_s = 3": "line 1: there is no setting 'recovery.leese_s'; the nearest is 'recovery.lease_s'",
    "seed = 1\nsteps = 0": "line 2: steps: Input should be greater than 0",
    "[batch]\nunit = 'samples'": "line 2: batch.unit: Input should be 'groups', 'rollouts' or 'tokens'",
    "rollouts = 5": "line 1: rollouts is a table: write [rollouts], and its settings below",
    "[rollouts]\nmax_in_flight = 4": "line 1: rollouts: max_in_flight (4) must hold one group (8)",
    "[rollouts]\nmin_group_size = 9": "line 1: rollouts: min_group_size (9) is larger than group_size (8)",
    "store = 's3://bucket'": "line 1: store: must be a shared directory: file:///absolute/path",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_in_the_file_is_named_with_its_line(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, text) == f"penstock.toml, {WRONG[text]}"


def test_everything_that_is_wrong_is_named(tmp_path: Path) -> None:
    first, second = refused(tmp_path, "steps = 0\nseed = 'x'").splitlines()
    assert first == "penstock.toml, line 1: steps: Input should be greater than 0"
    assert second.startswith("penstock.toml, line 2: seed: Input should be a valid integer")


def test_what_is_no_toml_is_named_with_its_place(tmp_path: Path) -> None:
    message = refused(tmp_path, "steps = 3\nseed\n")
    assert message.startswith("penstock.toml: not valid TOML:")
    assert "line 2" in message


def test_what_is_wrong_elsewhere_is_named_with_its_origin(tmp_path: Path) -> None:
    assert refused(tmp_path, "steps = 3", PENSTOCK_STEPS="many").startswith("environment, PENSTOCK_STEPS: steps: Input")
    assert refused(tmp_path, flags={"lag.max_s": 0}).startswith("--lag-max-s: lag.max_s: Input")
    assert refused(tmp_path, "steps = 3", flags={"steps": 0}) == "--steps: steps: Input should be greater than 0"
    small = refused(tmp_path, "[rollouts]\n", PENSTOCK_ROLLOUTS__MAX_IN_FLIGHT="4")
    assert small.startswith("environment, PENSTOCK_ROLLOUTS__MAX_IN_FLIGHT: rollouts: max_in_flight (4)")
    assert "recovery is a table" in refused(tmp_path, "recovery = 5", PENSTOCK_RECOVERY__LEASE_S="4")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PENSTOCK_REDIS_ULR", "PENSTOCK_REDIS_URL"),
        ("PENSTOCK_CONFG", "PENSTOCK_CONFIG"),
        ("PENSTOCK_RECOVERY__LEESE_S", "PENSTOCK_RECOVERY__LEASE_S"),
        ("PENSTOCK_STEPS__X", "PENSTOCK_STEPS"),
        ("PENSTOCK_RECOVERY_LEASE_S", "PENSTOCK_RECOVERY__LEASE_S"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused(tmp_path: Path, name: str, nearest: str) -> None:
    assert refused(tmp_path, **{name: "1"}) == f"environment: {name} is not a setting; the nearest is {nearest}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sessions.tokenizer", 'policy.renderer ("bytes" is now "bytes-chatml")'),
        ("batch.logprobs_mode", "engine.logprobs_mode"),
        ("engine.moe_layers", "engine.hidden_layers"),
    ],
)
def test_an_old_name_of_a_setting_is_refused_with_the_new_one(tmp_path: Path, old: str, new: str) -> None:
    assert refused(tmp_path, f"{old} = 1") == f"penstock.toml, line 1: {old!r} has a new name: {new}"
    variable = "PENSTOCK_" + old.upper().replace(".", "__")
    assert refused(tmp_path, **{variable: "1"}) == f"environment, {variable}: {old!r} has a new name: {new}"


@pytest.mark.parametrize("url", ["redis://:hunter2/x@h:1/0", "http://:hunter2@h/", "hunter2"])
def test_a_wrong_address_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        loaded(tmp_path, PENSTOCK_REDIS_URL=url)
    assert str(refusal.value).startswith("environment, PENSTOCK_REDIS_URL: redis_url: is not the address of a Redis")
    assert "hunter2" not in f"{refusal.value}{refusal.value.__cause__}"


@pytest.mark.parametrize("path", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*: (No such file|Is a directory)"):
        config.load(tmp_path / path, environ={})


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is no text"):
        config.load(tmp_path / "penstock.toml", environ={})


def test_the_address_of_the_environment_alone() -> None:
    assert config.redis_url({}) is None
    assert config.redis_url({"PENSTOCK_REDIS_URL": "redis://h/1"}) == "redis://h/1"
    with pytest.raises(ConfigError, match="environment, PENSTOCK_REDIS_URL: is not the address"):
        config.redis_url({"PENSTOCK_REDIS_URL": "h"})


@given(group_size=st.integers(1, 64), min_group_size=st.none() | st.integers(1, 100))
def test_the_smallest_group_that_is_kept_has_a_baseline_and_fits(group_size: int, min_group_size: int | None) -> None:
    try:
        rollouts = Rollouts(group_size=group_size, min_group_size=min_group_size, max_in_flight=1000)
    except ValidationError:
        assert min_group_size is not None
        assert min_group_size > group_size
        return
    smallest = rollouts.smallest_group
    assert 1 <= smallest <= group_size
    if min_group_size is not None:
        assert smallest == min_group_size
    elif group_size > 1:
        assert smallest >= 2
        assert smallest >= group_size / 2


def test_where_things_are(tmp_path: Path) -> None:
    plain = RunConfig(run_dir=tmp_path / "run")
    assert plain.ledger_path == tmp_path / "run" / "ledger.sqlite"
    assert plain.store_dir == tmp_path / "run" / "store"
    apart = RunConfig(run_dir=tmp_path / "run", ledger_dir=tmp_path / "fast", store=f"file://{tmp_path}/shared")
    assert apart.ledger_path == tmp_path / "fast" / "ledger.sqlite"
    assert apart.store_dir == tmp_path / "shared"


def test_every_setting_can_be_set_by_a_variable() -> None:
    unknown = {"PENSTOCK_" + key.replace(".", "__").upper(): "\0" for key in all_keys(RunConfig)}
    with pytest.raises(ConfigError) as refusal:
        config.load(None, environ=unknown)
    assert "is not a setting" not in str(refusal.value)
    assert "environment, PENSTOCK_NOOP__DROP_RATE: noop.drop_rate: Input should be a valid number" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "keys", "line"),
    [
        ("a = 1\nb = 2", ["b"], 2),
        ("a = 1\n[t]\na = 2", ["t", "a"], 3),
        ('[ "t" ]\n"a" = 2', ["t", "a"], 2),
        ("t.a = 2", ["t", "a"], 1),
        ("t = {a = 2}", ["t", "a"], 1),
        ("[t.u]\na = 2", ["t", "u", "a"], 2),
        ("# a = 1\n", ["a"], None),
    ],
)
def test_the_line_of_a_setting(text: str, keys: list[str], line: int | None) -> None:
    assert line_of(text, keys) == line
