"""Raises this process's limit of open files to match its concurrency, and warns if the hard
limit is lower."""

import logging
import resource

logger = logging.getLogger("headpond.descriptors")

# Redis, event loops, imported files, and the open parts of recordings (`store/parts.py`: 64).
BASE = 256
# One connection to the engine, one to a session server or a tool, and the pipes of a program.
PER_ROLLOUT = 4


def raise_limit(concurrency: int) -> int:
    """Raise the limit for `concurrency` rollouts."""
    return raise_to(BASE + PER_ROLLOUT * concurrency, lower="-c")


def raise_to(needed: int, *, lower: str) -> int:
    """Raise the soft limit and return it. The maximum would harm child programs: they inherit
    it, and some iterate over all descriptors. `lower` names the setting that asks for this many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning(
            "action=few_descriptors may_open=%d wanted=%d: connections beyond that wait, programs and files fail; "
            "raise the hard limit (ulimit -Hn; LimitNOFILE= in systemd, --ulimit nofile= in Docker), or lower %s",
            allowed,
            needed,
            lower,
        )
    return allowed
