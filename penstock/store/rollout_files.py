"""Where the files of a rollout's executions lie in the store: a directory each, so that none overwrites another's."""

FOLDER = "rollouts"


def directory(run: str) -> str:
    return f"{FOLDER}/{run}"


def key(run: str, rollout: str, attempt: int, execution: str) -> str:
    return f"{directory(run)}/{rollout}/{attempt}.{execution}"
