import inspect
import subprocess
import sys

import pytest

import headpond
from headpond import errors


@pytest.mark.parametrize("name", headpond.__all__)
def test_every_public_name_resolves_to_the_object_of_that_name(name: str) -> None:
    assert getattr(headpond, name).__name__ == name
    assert name in dir(headpond)


def test_every_error_is_a_public_name() -> None:
    defined = {
        name for name, each in vars(errors).items() if inspect.isclass(each) and each.__module__ == errors.__name__
    }
    assert defined <= set(headpond.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'headpond' has no attribute 'BatchWriter'"):
        _ = headpond.BatchWriter


BASE_INSTALL = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names and package not in ("headpond", "numpy", "xxhash"):
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)

sys.meta_path.insert(0, Refusing())
before = set(sys.modules)
"""
"""What `pip install headpond` installs: Python, NumPy and xxhash."""
MOST_MODULES = 10  # 6 with Python 3.11: headpond, typing and what that consists of


def run_in_base_install(program: str) -> str:
    command = [sys.executable, "-c", BASE_INSTALL + program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_importing_headpond_imports_no_other_module_of_it_and_nothing_outside_python() -> None:
    loaded = set(run_in_base_install("import headpond; print(*(sys.modules.keys() - before))").split())
    assert {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names} == {"headpond"}
    assert len(loaded) <= MOST_MODULES, "this keeps it within a few milliseconds"


def test_the_trainers_names_need_the_base_install_only() -> None:
    trainers = sorted(set(headpond.__all__) - (headpond.MODULES.keys() - {"BatchReader"}))
    assert {"BatchReader", "Stalled", "BatchError"} <= set(trainers)
    assert run_in_base_install(f"from headpond import {', '.join(trainers)}; print('imported')") == "imported\n"


def test_a_name_that_needs_more_says_what_to_install() -> None:
    program = "try:\n    from headpond import Score\nexcept ImportError as error:\n    print(error)"
    assert run_in_base_install(program).endswith("install the extra app, pip install 'headpond[app]'\n")
