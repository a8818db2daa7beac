import pytest

from penstock.errors import ConfigError
from penstock.registry import extend, lookup


def test_custom_names_extend_built_in_ones_and_never_replace_them() -> None:
    assert extend({"a": 1}, {"b": 2}, setting="x") == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match="x: a is built in; register the custom one under another name"):
        extend({"a": 1}, {"a": 2}, setting="x")


def test_an_unknown_name_is_refused_with_the_nearest_and_all_known_ones() -> None:
    assert lookup({"alpha": 1}, "alpha", setting="x") == 1
    with pytest.raises(ConfigError, match=r"x = 'alpa' is not known here; did you mean 'alpha'\? .*knows: alpha, beta"):
        lookup({"beta": 2, "alpha": 1}, "alpa", setting="x")
    with pytest.raises(ConfigError, match="x = 'alpha' is not known here; this process knows: none"):
        lookup({}, "alpha", setting="x")
