from pathlib import Path
from typing import Any

import pytest

from headpond.config.sources import load
from headpond.errors import ConfigError
from headpond.fields import TrainerField


def configured(path: Path, text: str, **environ: str) -> Any:
    file = path / "headpond.toml"
    file.write_text(text)
    return load(file, environ=environ).batch


def refusal(path: Path, text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as error:
        configured(path, text, **environ)
    return str(error.value).removeprefix(f"{path}/headpond.toml, ")


def test_a_field_is_declared_by_its_name(tmp_path: Path) -> None:
    text = "[batch.fields.weight]\n[batch.fields.level]\nper = 'sample'\ndtype = 'u8'\ndefault = 'required'"
    batch = configured(tmp_path, text, HEADPOND_BATCH__FIELDS__WEIGHT__SOURCE="turn")
    assert batch.declared_fields == (
        TrainerField(name="level", per="sample", dtype="u8", default=None),
        TrainerField(name="weight", source="turn", default=0.0),
    )
    assert [field.name for field in batch.fields_of("turn")] == ["weight"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[batch]\nfiels = {}", "line 2: there is no setting 'batch.fiels'; the nearest is 'batch.fields'"),
        ("[batch.fields.x]\ndtype = 'f16'", "line 2: batch.fields.x.dtype: Input should be 'f32'"),
        ("[batch.fields.x]\ndtype = 'u8'\ndefault = -1", "line 1: batch.fields.x: default = -1 is not"),
        ("[batch.fields.x]\ndtype = 'i32'\ndefault = 0.5", "line 1: batch.fields.x: default = 0.5 is not"),
        ("[batch.fields.x]\ndefualt = 1", "line 2: there is no setting 'batch.fields.x.defualt'; the nearest is"),
        ("[batch.fields.logprobs]", "line 1: batch.fields: logprobs: the batch has a column of that name"),
    ],
)
def test_a_wrong_declaration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(message)


@pytest.mark.parametrize("name", ["prime-rl", "prime-rl-2026-08"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("normalise = 'sample'", 'averages over tokens: set batch.normalise = "token", or use format = "native"'),
        ("fields = { x = {} }", "cannot hold batch.fields.x (f32 per token): it has ref_logprobs"),
        ("fields = { ref_logprobs = { dtype = 'f64' } }", "cannot hold batch.fields.ref_logprobs (f64 per token)"),
        ("fields = { ref_logprobs = { per = 'sample' } }", "cannot hold batch.fields.ref_logprobs (f32 per sample)"),
    ],
)
def test_prime_rl_formats_refuse_what_they_cannot_hold(tmp_path: Path, name: str, settings: str, message: str) -> None:
    text = f"[batch]\n{settings}\nformat = '{name}'"
    assert refusal(tmp_path, text).startswith(f'line 3: batch.format: "{name}" {message}')
    configured(tmp_path, f"[batch]\n{settings}")


def test_formats_of_prime_rl_accept_the_fields_that_prime_rl_has(tmp_path: Path) -> None:
    configured(tmp_path, "[batch]\nformat = 'prime-rl'\nfields = { ref_logprobs = {}, rl_weights = { default = 1 } }")
