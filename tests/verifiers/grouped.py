"""A taskset of `verifiers` whose rollouts are scored against each other: the package has no rewards for groups."""

from collections.abc import Sequence

from penstock.environments import PlayedRollout
from penstock.environments.verifiers import Verifiers


class Shortest(Verifiers):
    """The shortest answer of a group is worth 1, one of twice its length a half."""

    def score_group(self, example: int, rollouts: Sequence[PlayedRollout]) -> list[float]:
        lengths = [max(1, len(rollout.last_answer)) for rollout in rollouts]
        return [min(lengths) / length for length in lengths]
