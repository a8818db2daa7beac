"""Rewards -> advantages, in two phases. The group phase runs as soon as a group is complete. The
batch phase reads one scalar a rollout.

Float64 inside, float32 out. Sums are correctly rounded (math.fsum): the same rollouts give the
same bits in any order, on any machine. A group holds every scored rollout, dropped ones
included: they count in the baseline.
"""

from headpond.advantages.estimators import ESTIMATORS, Estimator
from headpond.advantages.phases import batch_phase, group_phase, reward_error
from headpond.advantages.settings import AdvantageSettings, Recipe, resolve
from headpond.advantages.shaping import Shaping
from headpond.advantages.values import BatchValues, Floats, GroupValues, TurnValues, deviation, mean

__all__ = [
    "ESTIMATORS",
    "AdvantageSettings",
    "BatchValues",
    "Estimator",
    "Floats",
    "GroupValues",
    "Recipe",
    "Shaping",
    "TurnValues",
    "batch_phase",
    "deviation",
    "group_phase",
    "mean",
    "resolve",
    "reward_error",
]
