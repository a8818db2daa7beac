"""Loads the estimator and the length shaping that `[advantages]` names, and checks their signatures."""

from collections.abc import Mapping

from headpond.advantages.estimators import ESTIMATORS, Estimator
from headpond.advantages.shaping import Shaping
from headpond.errors import ConfigError
from headpond.registry import Facts, checked_function, import_attribute, is_custom, lookup


def load_estimator(
    name: str, built_in: Mapping[str, Estimator] = ESTIMATORS, *, setting: str = "advantages.estimator"
) -> Estimator:
    """The built-in one, or the `Estimator` or function of `module:attribute`."""
    if not is_custom(name):
        return lookup(built_in, name, setting=setting)
    found, what = import_attribute(name, setting=setting), f"{setting} = {name!r}"
    if not isinstance(found, Estimator):
        return Estimator(group=checked_function(found, "group", what=what))
    checked_function(found.group, "group", what=f"{what}: `group`")
    if found.batch is not None:
        arguments = ("batch",) if found.state is None else ("batch", "state")
        advice = ", or give the Estimator a `state`" if found.state is None else ""
        checked_function(found.batch, *arguments, what=f"{what}: `batch`", advice=advice)
    elif found.state is not None:
        raise ConfigError(f"{what} has a state and no batch phase: set `batch`, a function of (batch, state)")
    return found


def check_estimator(name: str, *, setting: str) -> Facts:
    return {"batch_phase": load_estimator(name, setting=setting).batch is not None}


def load_shaping(name: str, built_in: Mapping[str, Shaping], *, setting: str = "advantages.length_shaping") -> Shaping:
    """The built-in one, or the function of `module:function`."""
    if not is_custom(name):
        return lookup(built_in, name, setting=setting)
    return checked_function(import_attribute(name, setting=setting), "group", what=f"{setting} = {name!r}")


def check_shaping(name: str, *, setting: str) -> Facts:
    load_shaping(name, {}, setting=setting)
    return {}
