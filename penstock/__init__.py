"""Penstock: the pipe between inference server and trainer in LLM reinforcement learning.

The public names, imported on first use: `import penstock` itself imports no other module. The library imports neither
Celery nor a web server.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batches import BatchReader
    from penstock.environments.agent_program import run_program
    from penstock.environments.grading import graded
    from penstock.environments.scores import Score
    from penstock.environments.tools import Tools, tool
    from penstock.errors import (
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
        IllegalTransition,
        InfrastructureFailure,
        Invariant,
        LedgerError,
        MalformedId,
        NotFound,
        NothingToTrain,
        OtherPlan,
        PenstockError,
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
    "IllegalTransition",
    "InfrastructureFailure",
    "Invariant",
    "LedgerError",
    "MalformedId",
    "NotFound",
    "NothingToTrain",
    "OtherPlan",
    "PenstockError",
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
    "BatchReader": "penstock.batches",
    "Score": "penstock.environments.scores",
    "Tools": "penstock.environments.tools",
    "tool": "penstock.environments.tools",
    "graded": "penstock.environments.grading",
    "run_program": "penstock.environments.agent_program",
}
"""public name -> its module; the names that are not here are in `penstock.errors`"""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(MODULES.get(name, "penstock.errors"))
    except ModuleNotFoundError as error:
        message = f"penstock.{name} needs {error.name}: install the extra app, pip install 'penstock[app]'"
        raise ImportError(message) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
