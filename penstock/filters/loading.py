"""Loads custom rules from `module:function`, checks their signatures, and checks what they return."""

from penstock.error_boundary import error_boundary
from penstock.errors import StageError
from penstock.filters.group_rules import GroupRewards, MatchGroup
from penstock.filters.token_rules import FindToken, RolloutTokens
from penstock.registry import Facts, checked_function, import_attribute


def load_token_rule(use: str, *, setting: str) -> FindToken:
    rule = checked_function(import_attribute(use, setting=setting), "rollout", what=f"{setting} = {use!r}")

    def find(rollout: RolloutTokens) -> int | None:
        with error_boundary(StageError, f"the filter {use} failed"):
            token = rule(rollout)
        if token is None:
            return None
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise StageError(f"the filter {use} returned {token!r}: it must return the index of a token, or None")
        return int(token)

    return find


def load_group_rule(use: str, *, setting: str) -> MatchGroup:
    rule = checked_function(import_attribute(use, setting=setting), "group", what=f"{setting} = {use!r}")

    def matches(group: GroupRewards) -> bool:
        with error_boundary(StageError, f"the filter {use} failed"):
            return bool(rule(group))

    return matches


def check_token_rule(name: str, *, setting: str) -> Facts:
    load_token_rule(name, setting=setting)
    return {}


def check_group_rule(name: str, *, setting: str) -> Facts:
    load_group_rule(name, setting=setting)
    return {}
