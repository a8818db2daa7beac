"""Staleness: how far the newest policy version may be ahead of the one that sampled a rollout."""


def is_stale(*, version_first: int, version_now: int, max_off_policy_steps: int) -> bool:
    """The one rule, for the filter, for rollouts in flight, for composing and for sealing.

    `version_first` is the policy version of the first generated token; -1, where nothing was generated, is never stale.
    """
    return version_first >= 0 and version_now - version_first > max_off_policy_steps
