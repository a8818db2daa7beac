import re
from pathlib import Path
from typing import Any

import pytest

from headpond import config
from headpond.config import RunConfig, redis_address
from headpond.config.named_rules import check_rules
from headpond.config.problems import all_keys
from headpond.errors import ConfigError


def loaded(tmp_path: Path, text: str = "", *, flags: dict[str, Any] | None = None, **environ: str) -> RunConfig:
    path = tmp_path / "headpond.toml"
    path.write_text(text)
    return config.load(path, flags=flags, environ=environ)


def refused(tmp_path: Path, text: str = "", *, flags: dict[str, Any] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        loaded(tmp_path, text, flags=flags, **environ)
    return str(refusal.value).replace(f"{tmp_path}/", "")


def test_a_configuration_may_be_empty() -> None:
    assert config.load(None, environ={}) == RunConfig()


def test_flags_override_variables_and_variables_override_the_file(tmp_path: Path) -> None:
    text = 'steps = 1\nseed = 1\nstore = "file:///from/file"\n[recovery]\nlease_s = 1.5\nmax_losses = 7\n'
    environ = {"HEADPOND_STEPS": "2", "HEADPOND_SEED": "2", "HEADPOND_RECOVERY__LEASE_S": "2.5", "HOME": "/root"}
    settings = loaded(tmp_path, text, flags={"steps": 3, "run_dir": None}, **environ)
    assert (settings.steps, settings.seed, settings.store) == (3, 2, "file:///from/file")
    assert (settings.recovery.lease_s, settings.recovery.max_losses) == (2.5, 7)
    assert settings.run_dir == RunConfig().run_dir


def test_a_variable_can_set_a_filter_and_the_estimator(tmp_path: Path) -> None:
    environ = {"HEADPOND_FILTERS__STALE__MAX_OFF_POLICY_STEPS": "3", "HEADPOND_ADVANTAGES__ESTIMATOR": "rloo"}
    settings = loaded(tmp_path, '[filters.stale]\nmode = "mask"\n', **environ)
    assert (settings.filters.stale.mode, settings.filters.stale.max_off_policy_steps) == ("mask", 3)
    assert settings.advantages.estimator == "rloo"


def test_headpond_config_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "headpond.toml"
    path.write_text("steps = 4")
    assert config.load(None, environ={"HEADPOND_CONFIG": str(path)}).steps == 4


WRONG = {
    "stpes = 3": "line 1: there is no setting 'stpes'; the nearest is 'steps'",
    "\n[recovery]\n\nleese_s = 3": "line 4: there is no setting 'recovery.leese_s'; the nearest is 'recovery.lease_s'",
    "lease_s = 3": "line 1: there is no setting 'lease_s'; the nearest is 'recovery.lease_s'",
    "recovery.leese_s = 3": "line 1: there is no setting 'recovery.leese_s'; the nearest is 'recovery.lease_s'",
    "seed = 1\nsteps = 0": "line 2: steps: Input should be greater than 0",
    "[batch]\nunit = 'samples'": "line 2: batch.unit: Input should be 'groups', 'rollouts' or 'tokens', not 'samples'",
    "rollouts = 5": "line 1: rollouts is a table: write [rollouts], and its settings below",
    "[rollouts]\nmax_in_flight = 4": "line 1: rollouts: max_in_flight (4) must hold one group (8)",
    "[rollouts]\nmin_group_size = 9": "line 1: rollouts: min_group_size (9) is larger than group_size (8)",
    "[filters]\nstail = 1": "line 2: there is no setting 'filters.stail'; the nearest is 'filters.stale.mode'",
    "[filters.repetition]\nwindw = 1": (
        "line 2: there is no setting 'filters.repetition.windw'; the nearest is 'filters.repetition.window'"
    ),
    "advantages = 5": "line 1: advantages is a table: write [advantages], and its settings below",
    "[filters.repetition]\n\nwindow = 0": "line 3: filters.repetition.window: Input should be greater than 0",
    "[filters.difficulty]\nlow = 2": (
        "line 1: filters.difficulty: low (2.0) is above high (1.0): all groups would match"
    ),
    "[filters.custom.x]\nuse = 'a:b'\nmode = 'all'": (
        "line 3: filters.custom.x.mode: Input should be 'off', 'monitor', 'mask' or 'drop', not 'all'"
    ),
    "[filters.stale]\nmode = 'dorp'": (
        "line 2: filters.stale.mode: Input should be 'off', 'monitor', 'mask' or 'drop', not 'dorp'; "
        "did you mean 'drop'?"
    ),
    "[batch]\norder = '0123456789abcdef0123456789abcdef0'": (
        "line 2: batch.order: Input should be 'planned-window' or 'completion'"
    ),
    "[batch.field.x]\ndefault = 1": "line 1: there is no setting 'batch.field'; the nearest is 'batch.fields'",
    "[recovry]\nlease_s = 1": "line 1: there is no setting 'recovry'; the nearest is 'recovery'",
    "[filters.custom]\nx = 'drop'": (
        "line 2: filters.custom.x is a table: write [filters.custom.x], and its settings below"
    ),
    "[advantages]\nlength_shaping = 'token'": (
        "line 2: advantages.length_shaping: 'token' is not built in; did you mean 'tokens'? built in are: "
        "linear, none, overlong, tokens, turns; name your own as module:attribute"
    ),
    "[filters]\ncustom = 3": "line 2: filters.custom is a table: write [filters.custom], and its settings below",
    "[advantages]\ntool_weight = -1": "line 2: advantages.tool_weight: Input should be greater than or equal to 0",
    "[environments.a]\nuse = 'x'\nwieght = 2": (
        "line 3: there is no setting 'environments.a.wieght'; the nearest is 'environments.NAME.weight'"
    ),
    "[environments.a.options]\nuse = 'x'": "line 1: environments.a.use: Field required",
    "environments = {a = {use = 'x', weight = -1}}": "line 1: environments.a.weight: Input should be greater than 0",
    "environments = 3": "line 1: environments is a table: write [environments], and its settings below",
    "[engine]\nurls = [\n  'http://a',\n  3,\n]": "line 4: engine.urls.1: Input should be a valid string",
    "[policy.sampling]\nstop = 'x'": "line 2: policy.sampling.stop: Input should be a list",
    "[batch]\nsize = true": "line 2: batch.size: Input should be a valid integer",
    "[batch]\nsize = '5'": "line 2: batch.size: Input should be a valid integer",
    "[policy]\nseeded = 1": "line 2: policy.seeded: Input should be a valid boolean",
    "run_dir = 3": "line 1: run_dir: Input should be a path, in quotes",
    "[rollouts]\ntimeout_s = inf": "line 2: rollouts.timeout_s: Input should be a finite number",
    "[http]\nport = 'on'": (
        "line 2: http.port: Input should be a valid integer, unable to parse string as an integer, or 'off', not 'on'"
    ),
    "[batch]\nnormalise = 'x'": (
        'line 2: batch.normalise: normalise = "x": use "token", "sample", "rollout" or "constant:L" with L above 0'
    ),
    "[batch]\npad_to_multiple_of = 7\nseq_len = 3": (
        "line 1: batch: seq_len (3) must be a multiple of pad_to_multiple_of (7): otherwise padding makes a full "
        "micro-batch longer than seq_len"
    ),
    "store = 's3://bucket'": (
        "line 1: store: 's3://bucket': there is no store 's3'; write file:///absolute/path for a shared directory, "
        "or module:Class://address for a store of your own"
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_in_the_file_is_reported_with_its_line(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, text) == f"headpond.toml, {WRONG[text]}"


def test_all_errors_are_reported(tmp_path: Path) -> None:
    first, second = refused(tmp_path, "steps = 0\nseed = 'x'").splitlines()
    assert first == "headpond.toml, line 1: steps: Input should be greater than 0"
    assert second.startswith("headpond.toml, line 2: seed: Input should be a valid integer")


def test_invalid_toml_is_reported_with_its_line(tmp_path: Path) -> None:
    message = refused(tmp_path, "steps = 3\nseed\n")
    assert message.startswith("headpond.toml: not valid TOML:")
    assert "line 2" in message


def test_an_error_in_a_variable_or_flag_names_it(tmp_path: Path) -> None:
    assert refused(tmp_path, "steps = 3", HEADPOND_STEPS="many").startswith("environment, HEADPOND_STEPS: steps: Input")
    assert refused(tmp_path, flags={"lag.trace_s": 0}).startswith("--lag-trace-s: lag.trace_s: Input")
    assert refused(tmp_path, "steps = 3", flags={"steps": 0}) == "--steps: steps: Input should be greater than 0"
    small = refused(tmp_path, "[rollouts]\n", HEADPOND_ROLLOUTS__MAX_IN_FLIGHT="4")
    assert small.startswith("environment, HEADPOND_ROLLOUTS__MAX_IN_FLIGHT: rollouts: max_in_flight (4)")
    assert "recovery is a table" in refused(tmp_path, "recovery = 5", HEADPOND_RECOVERY__LEASE_S="4")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("HEADPOND_REDIS_ULR", "HEADPOND_REDIS_URL"),
        ("HEADPOND_CONFG", "HEADPOND_CONFIG"),
        ("HEADPOND_RECOVERY__LEESE_S", "HEADPOND_RECOVERY__LEASE_S"),
        ("HEADPOND_STEPS__X", "HEADPOND_STEPS"),
        ("HEADPOND_RECOVERY_LEASE_S", "HEADPOND_RECOVERY__LEASE_S"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_one(tmp_path: Path, name: str, nearest: str) -> None:
    assert re.fullmatch(f"environment: {name} .* {nearest}", refused(tmp_path, **{name: "1"}))


@pytest.mark.parametrize("url", ["redis://:hunter2/x@h:1/0", "http://:hunter2@h/", "hunter2"])
def test_a_wrong_redis_url_is_refused_and_not_shown(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        loaded(tmp_path, HEADPOND_REDIS_URL=url)
    assert str(refusal.value).startswith("environment, HEADPOND_REDIS_URL: redis_url: is not the address of a Redis")
    assert "hunter2" not in f"{refusal.value}{refusal.value.__cause__}"


@pytest.mark.parametrize("path", ["missing.toml", "."])
def test_an_unreadable_file_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*: (No such file|Is a directory)"):
        config.load(tmp_path / path, environ={})


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "headpond.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        config.load(tmp_path / "headpond.toml", environ={})


def test_the_redis_url_can_be_read_without_a_configuration() -> None:
    assert redis_address.from_environment({}) is None
    assert redis_address.from_environment({"HEADPOND_REDIS_URL": "redis://h/1"}) == "redis://h/1"
    with pytest.raises(ConfigError, match="environment, HEADPOND_REDIS_URL: is not the address"):
        redis_address.from_environment({"HEADPOND_REDIS_URL": "h"})


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("FILTERS__DIFFICULTY__LOW", "0.25", 0.25),
        ("ADVANTAGES__ESTIMATOR", "my_package.mine:soft_rank", "my_package.mine:soft_rank"),
        ("ADVANTAGES__TOOL_WEIGHT", "2", 2.0),
        ("SESSIONS__APPEND_ROLES", "a, b", ("a", "b")),
        ("SESSIONS__APPEND_ROLES", "1", ("1",)),
        ("POLICY__RENDERER__BACKEND", "renderers", "renderers"),
        ("POLICY__SAMPLING__STOP", '["a, b", "\\n"]', ("a, b", "\n")),
        ("POLICY__SAMPLING__MORE__TOP_A", "0.5", 0.5),
        ("POLICY__SAMPLING__MORE", "{top_a = 0.5}", {"top_a": 0.5}),
        ("ENVIRONMENTS__SUMS__OPTIONS__NAME", "plain text", "plain text"),
        ("POLICY__SEEDED", "true", True),
    ],
)
def test_a_variable_sets_a_setting_of_any_type(tmp_path: Path, variable: str, value: str, expected: object) -> None:
    settings = loaded(tmp_path, "[environments.sums]\nuse = 'arithmetic'", **{f"HEADPOND_{variable}": value})
    found: Any = settings
    for key in variable.lower().split("__"):
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    assert found == expected


def test_a_variable_finds_the_name_that_the_file_spells(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "[environments.Sums]\nuse = 'guess'", HEADPOND_ENVIRONMENTS__SUMS__WEIGHT="3")
    assert {name: each.weight for name, each in settings.environments.items()} == {"Sums": 3.0}


def test_a_wrong_value_in_a_variable_names_it_in_every_section(tmp_path: Path) -> None:
    for variable, value, message in [
        ("HEADPOND_FILTERS__DIFFICULTY__LOW", "2", "filters.difficulty: low (2.0) is above high (1.0)"),
        ("HEADPOND_FILTERS__CUSTOM__MINE__MODE", "all", "filters.custom.mine.mode: Input should be 'off'"),
        ("HEADPOND_ADVANTAGES__ESTIMATOR", "rlooo", "advantages.estimator: 'rlooo' is not built in"),
        ("HEADPOND_ADVANTAGES__TOOL_WEIGHT", "-1", "advantages.tool_weight: Input should be greater"),
        ("HEADPOND_ENVIRONMENTS__A__OPTIONS", "x", "environments.a.options is a table"),
        ("HEADPOND_ENGINE", "x", "engine is a table"),
    ]:
        assert f"environment, {variable}: {message}" in refused(tmp_path, **{variable: value})


def test_a_rule_that_cannot_be_imported_is_reported_with_its_line(tmp_path: Path) -> None:
    text = "[advantages]\nestimator = 'json:dumpz'\n[filters.custom.x]\n\nuse = 'no_such_module:f'\n"
    with pytest.raises(ConfigError) as refusal:
        check_rules(loaded(tmp_path, text))
    first, second = str(refusal.value).replace(f"{tmp_path}/", "").splitlines()
    assert first.startswith(
        "headpond.toml, line 2: advantages.estimator = 'json:dumpz': module json has no 'dumpz'; did"
    )
    assert second.startswith("headpond.toml, line 5: filters.custom.x.use = 'no_such_module:f' cannot be imported")


def test_a_dialect_that_cannot_be_imported_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_rules(loaded(tmp_path, "[engine]\nmodel = 'policy'\ndialect = 'json:dumps'\n"))
    assert str(refusal.value).startswith(f"{tmp_path}/headpond.toml, line 3: engine.dialect = 'json:dumps' is not a")


def test_every_setting_can_be_set_by_a_variable() -> None:
    wrong = {"HEADPOND_" + key.replace(".", "__").upper(): "\0" for key in all_keys(RunConfig)}
    with pytest.raises(ConfigError) as refusal:
        config.load(None, environ=wrong)
    assert "is not a setting" not in str(refusal.value)
    assert "environment, HEADPOND_LAG__TRACE_S: lag.trace_s: Input should be a valid number" in str(refusal.value)
