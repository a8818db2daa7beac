"""Every error that Penstock raises on purpose.

PenstockError
 +-- ConfigError                 a setting is wrong; the message names file, line and the nearest right key
 +-- RunError                    a run cannot start or go on
 |    +-- RunLocked              somebody else holds the run or the Redis database
 |    +-- RunMismatch            the run directory belongs to another configuration
 |    +-- LedgerError            the ledger cannot be used here
 |         +-- IllegalTransition a state change that the transition table does not allow: a bug of ours
 +-- BlobError
 |    +-- BlobMissing
 |    +-- BlobCorrupt
 |    +-- BlobUnwritten          the store took nothing: disk full, no rights; tried again
 +-- SessionError                carries the HTTP status that the session server answers
 |    +-- BadRequest 400, Unauthorised 401, NotFound 404, TooSlow 408, Busy 409, Expired 410, TooLarge 413,
 |    |   NothingToTrain 422, Invariant 500, Upstream 502, Full 503
 |    +-- ContextFull 400        a BadRequest: the conversation was cut at its end and cannot go on
 +-- InfrastructureFailure       tried again, counted towards `max_failures`
 |    +-- EngineUnreachable      tried again, counted as nothing: submission pauses
 +-- PolicyFailure               what the policy did wrong: scored, never tried again
 +-- MalformedId                 an id does not have its format
 +-- StageError                  a stage cannot treat its input: a broken pipeline
 +-- BatchError                  what a trainer's reader meets
      +-- Stalled                no batch came in time; the message says why

Each takes one message, so that it survives JSON.
"""

from typing import ClassVar


class PenstockError(Exception):
    """`retryable` says whether the same work may succeed later without anybody changing anything."""

    retryable: ClassVar[bool] = False


class ConfigError(PenstockError):
    pass


class RunError(PenstockError):
    pass


class RunLocked(RunError):
    pass


class RunMismatch(RunError):
    pass


class LedgerError(RunError):
    pass


class IllegalTransition(LedgerError):
    pass


class BlobError(PenstockError):
    pass


class BlobMissing(BlobError):
    pass


class BlobCorrupt(BlobError):
    pass


class BlobUnwritten(BlobError):
    retryable = True


class SessionError(PenstockError):
    status_code: ClassVar[int] = 500


class BadRequest(SessionError):
    status_code = 400


class ContextFull(BadRequest):
    pass


class Unauthorised(SessionError):
    status_code = 401


class NotFound(SessionError):
    status_code = 404


class TooSlow(SessionError):
    status_code = 408


class Busy(SessionError):
    status_code = 409


class Expired(SessionError):
    status_code = 410


class TooLarge(SessionError):
    status_code = 413


class NothingToTrain(SessionError):
    status_code = 422


class Invariant(SessionError):
    status_code = 500


class Upstream(SessionError):
    status_code = 502


class Full(SessionError):
    status_code = 503


class InfrastructureFailure(PenstockError):
    retryable = True


class EngineUnreachable(InfrastructureFailure):
    pass


class PolicyFailure(PenstockError):
    pass


class MalformedId(PenstockError):
    pass


class StageError(PenstockError):
    pass


class BatchError(PenstockError):
    pass


class Stalled(BatchError):
    pass
