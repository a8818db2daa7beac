import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headpond.config import load
from headpond.config.engine import EnvironmentSettings
from headpond.environments import load_environments
from headpond.errors import ConfigError, StageError

MODULE = """
from dataclasses import dataclass

made = 0

class Good:
    def __init__(self, *, words: list[str], repeat: int = 1, note=None):
        global made
        made += 1
        self.examples = (word for word in words for _ in range(repeat))
    async def rollout(self, example, policy):
        return 1.0

@dataclass
class Plain:
    size: int = 2
    examples = range(3)
    async def rollout(self, example, policy):
        return 1.0
    def score_group(self, example, rollouts):
        return [1.0 for _ in rollouts]

class Raises(Good):
    def __init__(self):
        raise FileNotFoundError("no data set at /data")

class Sync(Good):
    def __init__(self):
        self.examples = [1]
    def rollout(self, example, policy):
        return 1.0

class Empty(Plain):
    examples = ()

class Breaks(Plain):
    @property
    def examples(self):
        return {}["missing"]

class Odd(Plain):
    class examples:
        def __len__(self): return 2
        def __getitem__(self, index): raise OSError("shard 7 is gone")
    examples = examples()

not_a_class = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "some_environments.py").write_text(MODULE)
    (tmp_path / "broken_environments.py").write_text("import os\n\nos.no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "some_environments"
    for name in ("some_environments", "broken_environments"):
        sys.modules.pop(name, None)


def test_a_wrong_option_is_reported_with_its_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = "[environments.sums]\nuse = 'arithmetic'\n[environments.sums.options]\nsize = 3\nsise = 4\n"
    for content, line, message in [
        (text, 5, "it has no option 'sise'; the nearest is 'size'"),
        (text.replace("3", "'x'"), 4, "options.size: Input should be a valid integer"),
        (text.replace("arithmetic", "arithmetics"), 2, "use = 'arithmetics' is not built in"),
    ]:
        file.write_text(content)
        config = load(file, environ={})
        with pytest.raises(ConfigError, match=re.escape(f"run.toml, line {line}: [environments.sums]: {message}")):
            load_environments(config.environments, config.place_of)
    variable = load(
        None, environ={"HEADPOND_ENVIRONMENTS__S__OPTIONS__SISE": "1", "HEADPOND_ENVIRONMENTS__S__USE": "guess"}
    )
    with pytest.raises(ConfigError, match=r"^environment, HEADPOND_ENVIRONMENTS__S__OPTIONS__SISE: \[environments.s\]"):
        load_environments(variable.environments, variable.place_of)


def test_the_built_in_environments_are_the_default() -> None:
    loaded = load_environments({})
    assert {name: environment.size for name, environment in loaded.items()} == {
        "arithmetic": 1_000,
        "guess": 1_000,
        "distinct": 10,
        "program": 1_000,
    }
    assert [name for name, environment in loaded.items() if environment.scores_groups] == ["distinct"]


def test_environments_are_named_by_the_configuration(module: str) -> None:
    loaded = load_environments(
        {
            "easy": EnvironmentSettings(use="arithmetic", options={"size": 5, "terms": 1}),
            "words": EnvironmentSettings(use=f"{module}:Good", options={"words": ["a", "b"], "repeat": 2}),
            "plain": EnvironmentSettings(use=f"{module}:Plain", options={"size": "7"}),
        }
    )
    assert [(name, environment.size) for name, environment in loaded.items()] == [
        ("easy", 5),
        ("words", 4),
        ("plain", 3),
    ]
    assert [loaded["words"].example(index) for index in (0, 3, 0)] == ["a", "b", "a"]
    assert sys.modules[module].made == 1
    assert (loaded["plain"].scores_groups, loaded["words"].scores_groups) == (True, False)
    with pytest.raises(StageError, match=r"'plain' has no example 3: it has 3"):
        loaded["plain"].example(3)


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("arithmetik", {}, r"use = 'arithmetik' is not built in; did you mean 'arithmetic'\?"),
        ("no_such_module:A", {}, r"No module named 'no_such_module'; install it where this process runs"),
        ("broken_environments:A", {}, r"AttributeError: .*no_such_thing.*broken_environments\.py, line 3"),
        ("some_environments:Missing", {}, r"module some_environments has no 'Missing'"),
        ("some_environments:not_a_class", {}, r"use = 'some_environments:not_a_class' is not a class"),
        ("some_environments:Raises", {}, r"FileNotFoundError: no data set at /data \(.*some_environments\.py, line"),
        ("some_environments:Sync", {}, r"it has no `async def rollout\(self, example, policy\)`"),
        ("some_environments:Empty", {}, r"it has no examples"),
        ("some_environments:Breaks", {}, r"its examples cannot be read: KeyError: 'missing'"),
        ("some_environments:Good", {"words": 3}, r"options\.words: Input should be a valid list"),
        ("some_environments:Good", {}, r"missing 1 required keyword-only argument: 'words'"),
        ("arithmetic", {"sise": 3}, r"it has no option 'sise'; the nearest is 'size'"),
        ("guess", {"boxes": 0}, r"options\.boxes: Input should be greater than or equal to 1"),
    ],
)
def test_an_environment_that_cannot_be_loaded_names_the_reason(
    module: str, use: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"^\[environments\.x\]: .*" + message):
        load_environments({"x": EnvironmentSettings(use=use, options=options)})


def test_one_error_lists_every_environment_that_cannot_be_loaded(module: str) -> None:
    wrong = {name: EnvironmentSettings(use=f"{module}:{name}") for name in ("Raises", "Plain", "Empty")}
    with pytest.raises(ConfigError) as failure:
        load_environments(wrong)
    assert [line.split(":")[0] for line in str(failure.value).splitlines()] == [
        "[environments.Raises]",
        "[environments.Empty]",
    ]


def test_an_example_that_cannot_be_read_names_its_environment(module: str) -> None:
    odd = load_environments({"odd": EnvironmentSettings(use=f"{module}:Odd")})["odd"]
    with pytest.raises(StageError, match=r"'odd' .*example 1: OSError: shard 7 is gone"):
        odd.example(1)
