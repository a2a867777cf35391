"""The exceptions of the library, in one tree under `DeltaWeightSyncError`.

`delta_weight_sync` exports the exceptions in `__all__`. A message is one sentence, with the fix if one is
known. Each class has a `kind`, a short, stable name that crosses process boundaries. A class that sets no
`kind` has the kind of its base.
"""

import errno
from collections.abc import Mapping
from typing import Any, ClassVar, Final

__all__ = [
    "AccessDeniedError",
    "BucketError",
    "BucketMissingError",
    "BucketUnreachableError",
    "CheckpointError",
    "CodecError",
    "CompatibilityError",
    "ConfigError",
    "DeltaWeightSyncError",
    "FencedError",
    "FolderError",
    "KeyFormatError",
    "MissingExtraError",
    "NoVersionError",
    "ObjectMissingError",
    "PeerError",
    "ProtocolError",
    "RolloutError",
    "SignatureError",
    "StateError",
    "UndoLogError",
]
_LONGEST: Final = 4000  # max characters of a message
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DeltaWeightSyncError(Exception):
    """Root of this library's errors. A message never holds an access token. A message is one printable line
    of at most 4,000 characters, because it may quote objects of a bucket."""

    kind: ClassVar[str] = "error"

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        cls.kind = kind or cls.kind

    def __str__(self) -> str:
        return printable(super().__str__()[:_LONGEST])[:_LONGEST]


class ConfigError(DeltaWeightSyncError, ValueError, kind="config"):
    """An option, an environment variable or a folder cannot be used."""


class SettingsError(ConfigError):
    """Environment variables cannot be used; the message names each variable and its fix."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("correct these variables: " + "; ".join(f"{k}: {v}" for k, v in problems.items()))
        self.problems = dict(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class KeyFormatError(ConfigError):
    """A signing or public key cannot be used, or its file exists already; the message quotes no secret."""


class FolderError(ConfigError):
    """`follow` or `checkout` cannot use a folder, because another process uses it or it holds other files."""


class MissingExtraError(ConfigError, ImportError):
    """A feature needs an extra of this library, and a package of that extra is not installed."""

    def __init__(self, what: str, extra: str, error: ImportError) -> None:
        super().__init__(
            f"{what} needs {error.name}, which is missing: run `pip install '.[{extra}]'` in the checkout"
        )
        self._made_of = what, extra, error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of


class CheckpointError(DeltaWeightSyncError, FileNotFoundError, kind="checkpoint"):
    """A checkpoint is missing, or a run cannot start from it."""


class BucketError(DeltaWeightSyncError, RuntimeError, kind="bucket"):
    """An operation on a bucket failed."""


class ObjectMissingError(BucketError, kind="object-missing"):
    """The bucket has no object with this key."""


class BucketMissingError(BucketError, kind="bucket-missing"):
    """The bucket does not exist, or is hidden from this token."""


class AccessDeniedError(BucketError, kind="access-denied"):
    """The credentials are missing, wrong or not sufficient. A retry does not help."""


class BucketUnreachableError(BucketError, kind="bucket-unreachable"):
    """The store gave no usable answer after several tries. A retry may help."""


class ProtocolError(DeltaWeightSyncError, ValueError, kind="protocol"):
    """A run's name, an object or a requested version is not valid; the message says which and why."""


class SignatureError(ProtocolError, kind="signature"):
    """No trusted key signed a record; the message names the trusted keys."""


class NoVersionError(ProtocolError, kind="no-version"):
    """The run has not published a version yet."""


class CodecError(DeltaWeightSyncError, ValueError, kind="codec"):
    """A delta file, or the weights to publish, do not fit the model or the format."""


class FencedError(DeltaWeightSyncError, RuntimeError, kind="fenced"):
    """Another trainer took over the run; this trainer must stop publishing."""


class PeerError(DeltaWeightSyncError, RuntimeError, kind="peer"):
    """Another process of this trainer failed, so this process stops, too."""


class StateError(DeltaWeightSyncError, RuntimeError, kind="state"):
    """A trainer state cannot be saved, or this trainer cannot resume from it."""


class UndoLogError(DeltaWeightSyncError, LookupError, kind="undo-log"):
    """The trainer's undo log cannot restore the weights of this sync: it holds only the newest syncs."""


class EngineError(DeltaWeightSyncError, RuntimeError, kind="engine"):
    """vLLM refused a call, or did not answer. If a worker raised an error, `kind` is that error's kind."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        if kind:
            self.kind = kind  # type: ignore[misc]  # only of this instance


class TooSoonError(EngineError):
    """vLLM cannot be restarted yet, because it started a moment ago."""


class CompatibilityError(DeltaWeightSyncError, RuntimeError, kind="compatibility"):
    """A release of vLLM, TRL or huggingface_hub lacks needed code; the message names the code and the fix."""


class RouteError(DeltaWeightSyncError, RuntimeError, kind="route"):
    """Deltas cannot be written into this model; the message says why."""


class CommitError(DeltaWeightSyncError, RuntimeError, kind="commit"):
    """This vLLM cannot commit: its release or its settings might let it reuse results of old weights."""


class WeightsChangedError(DeltaWeightSyncError, RuntimeError, kind="weights-changed"):
    """Something other than a commit wrote to the live weights."""


class WorkerError(DeltaWeightSyncError, RuntimeError, kind="worker"):
    """Another worker of this replica failed; the message is from that worker."""


class RolloutError(DeltaWeightSyncError, RuntimeError, kind="rollout"):
    """TRL's process that collects rollouts did not start or failed; the message names the cause."""


class CommandError(DeltaWeightSyncError, kind="command"):
    """The command given to `bisect` or `follow` failed, or `bisect` cannot find a first bad version."""


class ExportError(DeltaWeightSyncError, kind="export"):
    """The target of an export, such as Weights & Biases, refused the run's log or did not answer."""


def sentence(error: Exception) -> str:
    """What a program prints about an error: of a file, its path and, if its disk is full, the fix."""
    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, DeltaWeightSyncError):
        if error.filename:
            text = f"cannot use {error.filename}: {error.strerror or text}"
        if error.errno in _FULL:
            text += "; free space there, or choose another folder (TMPDIR is that of temporary files)"
    return printable(text)


def printable(text: str) -> str:
    r"""`text` as one line with escaped control codes, such as `\x1b` for the escape character."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )
