"""The rules that a configuration names as `module:attribute`, and their check when a process starts."""

from dataclasses import replace

from headpond.advantages import ESTIMATORS
from headpond.config.run import RunConfig
from headpond.declarations.named_code import NamedCode, check_here, check_in_child, is_custom
from headpond.filters import Mode


def named_rules(config: RunConfig) -> list[NamedCode]:
    """The rules that are not built in, without filters that are off."""
    named = [
        NamedCode(setting=f"advantages.{key}", name=name, check=f"headpond.advantages.settings:{check}")
        for key, name, check in (
            ("estimator", config.advantages.estimator, "check_estimator"),
            ("length_shaping", config.advantages.length_shaping, "load_shaping"),
        )
        if is_custom(name)
    ]
    for key, filters, check in (
        ("custom", config.filters.custom, "load_token_rule"),
        ("custom_groups", config.filters.custom_groups, "load_group_rule"),
    ):
        named += [
            NamedCode(setting=f"filters.{key}.{name}.use", name=each.use, check=f"headpond.filters.judging:{check}")
            for name, each in filters.items()
            if each.mode != Mode.OFF
        ]
    named += [
        NamedCode(setting=f"environments.{name}.sampler", name=each.sampler, check="headpond.data.samplers:load_class")
        for name, each in config.environments.items()
        if is_custom(each.sampler)
    ]
    return [replace(each, place=config.place_of(*each.setting.split("."))) for each in named]


def import_rules(config: RunConfig) -> None:
    """Import the rules into a process that runs them. Raise one ConfigError that lists every problem."""
    check_here(named_rules(config))


def check_rules(config: RunConfig) -> bool:
    """Check the rules and the engine's dialect for a process that runs neither. Return whether the estimator has a
    batch phase."""
    dialect = config.engine.dialect
    check, place = "headpond.engines.dialects:check_dialect", config.place_of("engine", "dialect")
    engine = NamedCode(setting="engine.dialect", name=dialect, check=check, place=place)
    facts = check_in_child([*named_rules(config), *([engine] if is_custom(dialect) else [])])
    estimator = config.advantages.estimator
    if is_custom(estimator):
        return bool(facts["advantages.estimator"]["batch_phase"])
    return ESTIMATORS[estimator].batch is not None
