"""The exceptions of the library, in one tree.

Every error that the library raises on purpose is a `DeltaWeightSyncError`. Its message is one sentence that
names the fix. Each class has a `kind`, a short stable name, which crosses process boundaries.

    DeltaWeightSyncError
        ConfigError                  an option, an environment variable or a folder cannot be used
            SettingsError            several environment variables
            KeyFormatError           a signing or public key
            FolderError              the folder that `follow` writes to
            MissingExtraError        a package is not installed
        CheckpointError              a checkpoint is missing, or a run cannot start from it
        BucketError                  an operation on the bucket failed
            ObjectMissingError, BucketMissingError, AccessDeniedError, BucketUnreachableError
        ProtocolError                an object of the run is not what the wire format allows
            SignatureError           it is not signed by a trusted key
            NoVersionError           the run has no version yet
        CodecError                   a delta file is damaged, or does not fit
        FencedError                  another trainer took over the run
        PeerError                    another process of this trainer failed
        StateError                   a trainer state cannot be saved or restored
        UndoLogError                 the undo log does not reach that far back
        EngineError                  vLLM refused or lost a call
            TooSoonError, RefusedError
        CompatibilityError           this release of vLLM or TRL is not the tested one
        RouteError                   deltas cannot be written into this model
        CommitError                  this vLLM cannot take weights between two steps
        WeightsChangedError          something other than a commit wrote to the live weights
        WorkerError                  another worker of this replica failed
        CommandError, BisectError    `delta-weight-sync` commands
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

_LONGEST: Final = 4000  # characters of a message


class DeltaWeightSyncError(Exception):
    """Root of all errors of this library; the message is one sentence with the fix and holds no token.

    Messages may quote objects of a bucket, and are printed, logged and shown. So they are one printable
    line of at most 4,000 characters.
    """

    kind: ClassVar[str] = "error"

    def __str__(self) -> str:
        return printable(super().__str__()[:_LONGEST])[:_LONGEST]


class ConfigError(DeltaWeightSyncError, ValueError):
    """An option, an environment variable or a folder cannot be used."""

    kind = "config"


class SettingsError(ConfigError):
    """Some environment variables cannot be used; the message names each of them and the fix."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("set these variables: " + "; ".join(f"{k}: {v}" for k, v in problems.items()))
        self.problems = dict(problems)


class KeyFormatError(ConfigError):
    """A signing or public key cannot be used; the message names its variable and quotes no secret."""


class FolderError(ConfigError):
    """`follow` cannot use this folder: another process uses it, or it holds something else."""


class MissingExtraError(ConfigError, ImportError):
    """A package of an extra of this library is not installed."""

    def __init__(self, what: str, extra: str, error: ModuleNotFoundError) -> None:
        super().__init__(
            f"{what} needs {error.name}, which is missing: run `pip install 'delta-weight-sync[{extra}]'`"
        )


class CheckpointError(DeltaWeightSyncError, FileNotFoundError):
    """A checkpoint is missing, or a run cannot start from it."""

    kind = "checkpoint"


class BucketError(DeltaWeightSyncError, RuntimeError):
    """An operation on a bucket failed. Messages never hold a token."""

    kind = "bucket"


class ObjectMissingError(BucketError):
    """The bucket has no object with this key."""

    kind = "object-missing"


class BucketMissingError(BucketError):
    """The bucket does not exist, or is hidden from this token."""

    kind = "bucket-missing"


class AccessDeniedError(BucketError):
    """The credentials are missing, wrong or not sufficient. A retry does not help."""

    kind = "access-denied"


class BucketUnreachableError(BucketError):
    """The store gave no usable answer after several tries. A retry may help."""

    kind = "bucket-unreachable"


class ProtocolError(DeltaWeightSyncError, ValueError):
    """An object of the run is not what the wire format allows; the message names the object and why."""

    kind = "protocol"


class SignatureError(ProtocolError):
    """No trusted key signed a record; the message names the trusted keys."""

    kind = "signature"


class NoVersionError(ProtocolError):
    """The run has not published a version yet."""

    kind = "no-version"


class CodecError(DeltaWeightSyncError, ValueError):
    """A delta file is not what a publisher writes. Nothing of it is applied."""

    kind = "codec"


class FencedError(DeltaWeightSyncError, RuntimeError):
    """Another trainer took over the run; this one must stop publishing."""

    kind = "fenced"


class PeerError(DeltaWeightSyncError, RuntimeError):
    """Another process of this trainer failed, so this one stops too."""

    kind = "peer"


class StateError(DeltaWeightSyncError, RuntimeError):
    """A trainer state cannot be saved, or this trainer cannot resume from it."""

    kind = "state"


class UndoLogError(DeltaWeightSyncError, LookupError):
    """The undo log does not reach back to this sync."""

    kind = "undo-log"


class EngineError(DeltaWeightSyncError, RuntimeError):
    """vLLM refused or lost a call.

    Attributes:
        kind: The `kind` of the error that a worker raised, or "engine".
    """

    kind = "engine"

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        if kind:
            self.kind = kind  # type: ignore[misc]  # of this instance: what the worker sent


class TooSoonError(EngineError):
    """vLLM started a moment ago and is not restarted yet."""


class RefusedError(EngineError):
    """vLLM cannot take this version. The follower waits for another version or for the owner."""


class CompatibilityError(DeltaWeightSyncError, RuntimeError):
    """This release of vLLM or TRL is not the tested one; the message names both and the fix."""

    kind = "compatibility"


class RouteError(DeltaWeightSyncError, RuntimeError):
    """Deltas cannot be written into this model; the message names the tensor or parameter."""

    kind = "route"


class CommitError(DeltaWeightSyncError, RuntimeError):
    """This vLLM, or its configuration, cannot take weights between two steps."""

    kind = "commit"


class WeightsChangedError(DeltaWeightSyncError, RuntimeError):
    """Something other than a commit wrote to the live weights."""

    kind = "weights-changed"


class WorkerError(DeltaWeightSyncError, RuntimeError):
    """Another worker of this replica failed; the message is that worker's."""

    kind = "worker"


class CommandError(DeltaWeightSyncError):
    """Your command failed."""

    kind = "command"


class BisectError(DeltaWeightSyncError):
    """`bisect` cannot name a first bad version."""

    kind = "bisect"


def kind_of(error: BaseException) -> str:
    """The stable `kind` of an error of this library, or "unexpected" for any other."""
    return error.kind if isinstance(error, DeltaWeightSyncError) else "unexpected"


def printable(text: str) -> str:
    r"""`text` as one line without control codes: an escape character becomes `\x1b`."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )
