"""Loads custom rules from `module:function`, checks their signatures, and checks what they return."""

import operator
from typing import Any

import numpy as np

from headpond.error_boundary import described, error_boundary
from headpond.errors import StageError
from headpond.filters.rules import FindToken, GroupRewards, MatchGroup, RolloutTokens
from headpond.registry import Facts, checked_function, import_attribute


def load_token_rule(use: str, *, setting: str) -> FindToken:
    rule = checked_function(import_attribute(use, setting=setting), "rollout", what=f"{setting} = {use!r}")

    def find(rollout: RolloutTokens) -> int | None:
        with error_boundary(StageError, f"the filter {use} failed"):
            token = rule(rollout)
            return None if token is None else _index(token, len(rollout.input_ids), use)

    return find


def load_group_rule(use: str, *, setting: str) -> MatchGroup:
    rule = checked_function(import_attribute(use, setting=setting), "group", what=f"{setting} = {use!r}")

    def matches(group: GroupRewards) -> bool:
        with error_boundary(StageError, f"the filter {use} failed"):
            matched = rule(group)
            if not isinstance(matched, bool | np.bool_):
                raise StageError(f"the filter {use} returned {described(matched)}: it must return True or False")
            return bool(matched)

    return matches


def _index(token: Any, tokens: int, use: str) -> int:
    """0 is also the index in a rollout without tokens, as in the built-in rules."""
    try:
        index = -1 if isinstance(token, bool) else operator.index(token)
    except TypeError:
        index = -1
    if not 0 <= index < max(tokens, 1):
        returned = f"{described(token)} for {tokens} tokens"
        raise StageError(f"the filter {use} returned {returned}: it must return the index of a token, or None")
    return index


def check_token_rule(name: str, *, setting: str) -> Facts:
    load_token_rule(name, setting=setting)
    return {}


def check_group_rule(name: str, *, setting: str) -> Facts:
    load_group_rule(name, setting=setting)
    return {}
