from pathlib import Path

import pytest

from headpond.config import load
from headpond.errors import ConfigError


def written(path: Path, text: str) -> Path:
    file = path / "run.toml"
    file.write_text(text)
    return file


def test_urls_can_be_a_list_or_a_variable(tmp_path: Path) -> None:
    file = written(tmp_path, '[engine]\nurls = ["http://a:8000/v1", "http://b:8000/"]\n')
    assert load(file, environ={}).engine.urls == ("http://a:8000", "http://b:8000")
    variables = {"HEADPOND_ENGINE__URLS": "http://c:1, https://d"}
    assert load(file, environ=variables).engine.urls == ("http://c:1", "https://d")


def test_a_variable_can_set_an_environment() -> None:
    config = load(None, environ={"HEADPOND_ENVIRONMENTS__SUMS__USE": "arithmetic"})
    assert config.environments["sums"].use == "arithmetic"
    with pytest.raises(ConfigError, match="HEADPOND_ENVIRONMENTS__SUMS is not a setting"):
        load(None, environ={"HEADPOND_ENVIRONMENTS__SUMS": "arithmetic"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[engine]\nurls = ["a:8000"]', r"line 2: engine.urls: give at least one URL that looks like http://host:port"),
        ('[engine]\nurls = ["http://"]', r"line 2: engine.urls: give at least one URL that looks like http:"),
        ('[engine]\nurls = ["http://me:pw@a:8000"]', r"line 2: engine.urls: a URL with a user or a password is shown"),
        ("[engine]\nretrys = 3", r"line 2: there is no setting 'engine.retrys'; the nearest is 'engine.retries'"),
        ("[policy.sampling]\ntemperature = -1", r"line 2: policy.sampling.temperature: .*greater than or equal to 0"),
        ("[policy.sampling]\nmore = {n = 2}", r"line 2: policy.sampling.more: n: set by Headpond itself"),
        ("[policy.renderer]\nmodle = 3", r"line 2: there is no setting 'policy.renderer.modle'"),
        ("[policy]\nrenderer = 3", r"line 2: policy.renderer is a table"),
        ("[policy]\nmax_samples = 1000", r"line 2: policy.max_samples: .*less than or equal to 128"),
        ('[environments.x]\nuses = "guess"', r"line 1: environments.x.use: Field required"),
        ('[environments.x]\nuses = "guess"', r"line 2: there is no .*; the nearest is 'environments.NAME.use'"),
        ('[environments."a b"]\nuse = "guess"', r"should match pattern"),
    ],
)
def test_a_wrong_setting_is_reported_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load(written(tmp_path, text), environ={})
    assert "pw" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "backend", "model"),
    [
        ('renderer = "bytes-chatml"', "bytes-chatml", "bytes-chatml"),
        ('renderer = "/models/qwen"', "directory", "/models/qwen"),
        ('renderer = { backend = "renderers", model = "/m", options = { name = "qwen3" } }', "renderers", "/m"),
        ("[policy.renderer]\nchat_template_kwargs = { enable_thinking = false }", "directory", None),
    ],
)
def test_a_renderer_is_a_name_a_directory_or_a_table(
    tmp_path: Path, text: str, backend: str, model: str | None
) -> None:
    renderer = load(written(tmp_path, f"[policy]\n{text}\n"), environ={}).policy.renderer
    assert renderer is not None
    assert (renderer.backend, renderer.model) == (backend, model)
    from_variable = load(None, environ={"HEADPOND_POLICY__RENDERER": "/models/qwen"}).policy.renderer
    assert from_variable is not None
    assert from_variable.model == "/models/qwen"


def test_the_engines_key_is_not_in_the_repr() -> None:
    config = load(None, environ={"HEADPOND_ENGINE__API_KEY": "hush"})
    assert config.engine.api_key is not None
    assert "hush" not in repr(config)
