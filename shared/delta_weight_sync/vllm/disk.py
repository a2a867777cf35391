"""A replica's folders, and versions as checkpoints in them, where vLLM and its workers read them.

The anchor stays on disk, so that healing and going back fetch a few deltas at most. A version is a copy of
the anchor with its deltas applied; all workers map the same pages. The commit proves its content.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from delta_weight_sync.checkpoint import WEIGHTS, map_bits
from delta_weight_sync.errors import ProtocolError, SettingsError
from delta_weight_sync.reader import RunReader, checkpoint_errors, remove_other_files
from delta_weight_sync.records import Manifest

SCRATCH_PREFIX: Final = "delta-weight-sync-replica-"
_MARK: Final = ".alive"  # a file that stays locked while the process lives
_STEPS = 10  # progress is reported in tenths, because each change is written to the run's log
_COMING = "coming"

Shapes = dict[str, list[int]]
"""Checkpoint name -> shape."""


def private_folder(folder: str, variable: str) -> Path:
    """The folder that `variable` names, created for this user alone if it is missing.

    vLLM runs or serves what it reads there, so a folder of another user (anybody can create one in /tmp), or
    one that everybody may write to, is refused with `SettingsError`.
    """
    path, problem = Path(folder), ""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if {path.lstat().st_uid, path.stat().st_uid} != {os.geteuid()}:
            problem = "belongs to another user"
        elif path.stat().st_mode & stat.S_IWOTH:
            problem = "may be written to by every user"
    except OSError as error:
        problem = f"cannot be made ({error.strerror})"
    if problem:
        raise SettingsError(
            {variable: f"{folder} {problem}; name a folder of your own, or one that is not there"}
        )
    return path


def scratch_folder() -> Path:
    """A new temporary folder, removed when this process ends. Removes folders that killed replicas left."""
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*"):
        if _is_left(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # The lock, held until the end, comes before the name: no other process ever finds the mark unlocked.
    mark = folder / f"{_MARK}.new"
    fcntl.flock(os.open(mark, os.O_CREAT | os.O_WRONLY, 0o600), fcntl.LOCK_EX)
    mark.rename(folder / _MARK)
    return folder


def _is_left(folder: Path) -> bool:
    """Whether it belongs to this user and its process is gone; a folder without a mark is being made."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        with (folder / _MARK).open() as mark:
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # includes BlockingIOError: the lock is held
        return False
    return True


class Layout:
    """One anchor and one version below `folder`."""

    def __init__(self, reader: RunReader, folder: Path) -> None:
        """Remove what a killed process left unfinished: deltas, downloads, a version. Complete files stay."""
        self._reader, self._anchors, self._version = reader, folder / "anchors", folder / "checkpoint"
        self._wanted = self._fetched = 0  # bytes of the version that `put` builds
        parts = (*folder.glob(".*.part"), *self._anchors.rglob(".*.part"))
        for left in (*parts, *folder.glob("*.safetensors")):
            left.unlink()
        shutil.rmtree(self._version, ignore_errors=True)

    def put(self, manifest: Manifest) -> tuple[Path, Shapes]:
        """Build a version; returns its folder and the shapes of its tensors."""
        self._wanted, self._fetched = manifest.recipe().size, 0
        try:
            anchor = self._anchor(manifest)
            shutil.rmtree(self._version, ignore_errors=True)
            shutil.copytree(anchor, self._version)
            with checkpoint_errors(manifest.anchor):
                state = map_bits(self._version / WEIGHTS, "r+")
            for ref in self._reader.recipe(manifest).deltas:
                self._reader.apply(state, ref, self._version)
                self._fetched += ref.size
        finally:
            self._wanted = 0
        return self._version, {name: list(bits.shape) for name, bits in state.items()}

    def done(self) -> None:
        """Remove the version's weights: they are live."""
        (self._version / WEIGHTS).unlink()

    def progress(self) -> str:
        """What `put` has fetched, such as "27 of 269 MB", in tenths of the whole; "" if it is not at work."""
        if not (wanted := self._wanted):
            return ""
        try:
            folders = (self._anchors, self._version)
            parts = sum(part.stat().st_size for folder in folders for part in folder.glob("**/.*.part"))
        except FileNotFoundError:  # a file was finished, or its folder removed, meanwhile
            parts = 0
        share = _STEPS * min(self._fetched + parts, wanted) // wanted
        digits = 0 if wanted >= 10e6 else 1
        return f"{share * wanted / _STEPS / 1e6:.{digits}f} of {wanted / 1e6:.{digits}f} MB"

    def _anchor(self, manifest: Manifest) -> Path:
        """The anchor's folder, named by its content; fetched again if missing or damaged since. If a fetch
        fails, complete files stay for the next try."""
        anchor = manifest.anchor
        weights = next((ref for ref in anchor.files if ref.name == WEIGHTS), None)
        if weights is None:
            raise ProtocolError(f"the anchor of version {anchor.version} has no {WEIGHTS}")
        kept, coming = self._anchors / weights.sha256, self._anchors / _COMING
        if all((path := kept / ref.name).is_file() and ref.is_in(path) for ref in anchor.files):
            return kept
        if kept.exists():
            shutil.rmtree(coming, ignore_errors=True)
            kept.rename(coming)
        remove_other_files(coming, anchor)
        for ref in anchor.small_first():
            if ref is weights:  # the disk may have no room for those of two anchors
                for other in self._anchors.iterdir():
                    if other != coming:
                        shutil.rmtree(other)
            self._reader.fetch(ref, coming)
            self._fetched += ref.size
        return coming.rename(kept)
