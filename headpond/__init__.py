"""Headpond: the pipe between inference server and trainer in LLM reinforcement learning.

The public names are imported on first use: `import headpond` itself imports no other module. The
library imports neither Celery nor a web server.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headpond.batches import BatchReader
    from headpond.environments.agent_program import run_program
    from headpond.environments.grading import graded
    from headpond.environments.protocol import Score
    from headpond.environments.tools import Tools, tool
    from headpond.errors import (
        Aborted,
        BadRequest,
        BatchError,
        BlobCorrupt,
        BlobError,
        BlobMissing,
        BlobUnwritten,
        Busy,
        ConfigError,
        ContextFull,
        EngineUnreachable,
        Expired,
        Full,
        HeadpondError,
        IllegalTransition,
        InfrastructureFailure,
        Invariant,
        LedgerError,
        MalformedId,
        NotFound,
        NothingToTrain,
        OtherPlan,
        PolicyFailure,
        RunError,
        RunLocked,
        RunMismatch,
        SessionError,
        StageError,
        Stalled,
        TooLarge,
        TooSlow,
        Unauthorised,
        Upstream,
    )

__all__ = [
    "Aborted",
    "BadRequest",
    "BatchError",
    "BatchReader",
    "BlobCorrupt",
    "BlobError",
    "BlobMissing",
    "BlobUnwritten",
    "Busy",
    "ConfigError",
    "ContextFull",
    "EngineUnreachable",
    "Expired",
    "Full",
    "HeadpondError",
    "IllegalTransition",
    "InfrastructureFailure",
    "Invariant",
    "LedgerError",
    "MalformedId",
    "NotFound",
    "NothingToTrain",
    "OtherPlan",
    "PolicyFailure",
    "RunError",
    "RunLocked",
    "RunMismatch",
    "Score",
    "SessionError",
    "StageError",
    "Stalled",
    "TooLarge",
    "TooSlow",
    "Tools",
    "Unauthorised",
    "Upstream",
    "graded",
    "run_program",
    "tool",
]

MODULES = {
    "BatchReader": "headpond.batches",
    "Score": "headpond.environments.protocol",
    "Tools": "headpond.environments.tools",
    "tool": "headpond.environments.tools",
    "graded": "headpond.environments.grading",
    "run_program": "headpond.environments.agent_program",
}  # Public name -> its module. Names that are not here are in `headpond.errors`.


if not os.path.isdir(os.path.join(os.path.dirname(__file__), "tasks")):  # noqa: PTH112, PTH118, PTH120  # pathlib is slow
    raise ImportError(
        "headpond/tasks is not a folder: this copy of the repository lost its links (headpond/tasks -> ../tasks). "
        "Clone it with git, on Windows with `git clone -c core.symlinks=true`, or install a wheel"
    )


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(MODULES.get(name, "headpond.errors"))
    except ModuleNotFoundError as error:
        message = f"headpond.{name} needs {error.name}: install the extra app, pip install 'headpond[app]'"
        raise ImportError(message) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
