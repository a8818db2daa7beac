"""How many files this process may open: raised to what its concurrency takes, and a warning where that is forbidden."""

import logging
import resource

logger = logging.getLogger("penstock.descriptors")

# Redis, the loops, imported files, and the parts of recordings that are kept open (`store/parts.py`: 64).
BASE = 256
# A connection to the engine and one to a session server or a tool, and the pipes of a program.
PER_ROLLOUT = 4


def raise_limit(concurrency: int) -> int:
    """The limit that holds from now on. Not simply the highest: programs inherit it, and some go through all of it."""
    wanted = BASE + PER_ROLLOUT * concurrency
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    affordable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (affordable, hard))
    if affordable < wanted:
        logger.warning(
            "action=few_descriptors may_open=%d wanted=%d rollouts=%d: connections beyond that wait, programs and "
            "files fail; raise the hard limit (ulimit -Hn; LimitNOFILE= in systemd, --ulimit nofile= in Docker), or "
            "lower -c",
            affordable,
            wanted,
            concurrency,
        )
    return affordable
