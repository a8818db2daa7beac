import inspect
import subprocess
import sys

import pytest

import penstock
from penstock import errors


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_resolves_to_the_object_of_that_name(name: str) -> None:
    assert getattr(penstock, name).__name__ == name
    assert name in dir(penstock)


def test_every_error_is_a_public_name() -> None:
    defined = {
        name for name, each in vars(errors).items() if inspect.isclass(each) and each.__module__ == errors.__name__
    }
    assert defined <= set(penstock.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'BatchWriter'"):
        _ = penstock.BatchWriter


def loaded_by(statement: str) -> set[str]:
    program = f"import sys; before = set(sys.modules); {statement}; print(*(sys.modules.keys() - before))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_importing_penstock_imports_no_other_module_of_it_and_nothing_heavy() -> None:
    loaded = loaded_by("import penstock")
    assert {name for name in loaded if name.startswith("penstock")} == {"penstock"}
    assert not loaded & {"numpy", "pydantic"}


def test_the_batch_reader_is_imported_without_the_app() -> None:
    assert not loaded_by("from penstock import BatchReader, Stalled") & {"pydantic", "msgspec", "orjson", "aiohttp"}
