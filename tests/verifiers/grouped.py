"""A `verifiers` taskset with a group score: the package itself has no group rewards."""

from collections.abc import Sequence

from headpond.environments import PlayedRollout
from headpond.environments.verifiers import Verifiers


class Shortest(Verifiers):
    """The shortest answer of a group gets 1, one of twice its length 0.5."""

    def score_group(self, example: int, rollouts: Sequence[PlayedRollout]) -> list[float]:
        lengths = [max(1, len(rollout.last_answer)) for rollout in rollouts]
        return [min(lengths) / length for length in lengths]
