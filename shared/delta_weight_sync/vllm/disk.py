"""A replica's folders, where the follower builds versions as checkpoints for vLLM and its workers.

The follower is the replica's thread that takes versions from the bucket. To build a version, the follower
copies the version's anchor (a whole checkpoint), and applies deltas and jumps (deltas over several versions)
to the copy. The anchor stays on disk, so the next version with this anchor needs only deltas and jumps. All
workers map the same files. The digest is not checked here, because the commit checks it.
"""

import fcntl
import os
import shutil
import stat
from pathlib import Path

from delta_weight_sync.checkpoint import dtypes_in
from delta_weight_sync.engine import Dtypes, Shapes
from delta_weight_sync.errors import ProtocolError, SettingsError
from delta_weight_sync.reader import RunReader, apply_delta, map_weights, remove_other_files
from delta_weight_sync.records import AnchorRef, Manifest

_STEPS = 10  # progress is reported in tenths, because each new text of the progress is logged


def private_folder(folder: str, variable: str, *, keep: bool = True) -> Path:
    """Return the folder that `variable` names; create it for this user alone if it is missing.

    vLLM executes or serves the folder's files (chat templates, weights), and a replica deletes files there.
    So `SettingsError` is raised if the folder belongs to another user (anyone can create one in /tmp), if
    every user may write to it, if it holds files although no replica used it, or if another process has
    locked it. With `keep`, this process holds the lock until it ends, however it ends."""
    path = Path(folder)
    problem = ""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if {path.lstat().st_uid, path.stat().st_uid} != {os.geteuid()}:
            problem = "belongs to another user"
        elif path.stat().st_mode & stat.S_IWOTH:
            problem = "may be written to by every user"
        elif {found.name for found in path.iterdir()} - {"lost+found"} and not (path / ".lock").exists():
            problem = "holds other files"
        else:
            lock = os.open(path / ".lock", os.O_CREAT | os.O_WRONLY, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not keep:
                os.close(lock)
    except BlockingIOError:
        problem = "is used by another replica"
    except OSError as error:
        problem = f"cannot be created or locked ({error.strerror})"
    if problem:
        fix = "name a folder of your own, or one that does not exist"
        raise SettingsError({variable: f"{folder} {problem}; {fix}"})
    return path


class Layout:
    """One anchor and one version below `folder`."""

    def __init__(self, reader: RunReader, folder: Path) -> None:
        """Remove what a killed process left (deltas, partial downloads, the version); keep anchors."""
        self._reader = reader
        self._anchors = folder / "anchors"
        self._version = folder / "checkpoint"
        self._coming = self._anchors / "coming"
        self._deltas = folder / "deltas"
        self._wanted = 0  # bytes that `put` must fetch; 0 while it fetches nothing
        self._fetched = 0  # the anchor's bytes, once `put` has fetched the whole anchor; until then 0
        for left in (*folder.glob(".*.part"), *self._coming.glob(".*.part"), *folder.glob("*.safetensors")):
            left.unlink()
        for unfinished in (self._deltas, self._version):
            shutil.rmtree(unfinished, ignore_errors=True)

    def put(self, manifest: Manifest) -> tuple[Path, Shapes, Dtypes]:
        """Build a version; returns its folder, and the shapes and dtypes of its tensors."""
        recipe = self._reader.recipe(manifest)
        self._wanted = recipe.size
        self._fetched = 0
        remove_other_files(self._deltas, recipe)
        try:
            anchor = self._anchor(manifest.anchor)
            deltas = self._reader.fetch_all(recipe.deltas, self._deltas)
        finally:
            self._wanted = 0
        shutil.rmtree(self._version, ignore_errors=True)
        shutil.copytree(anchor, self._version)
        state = map_weights(self._version, manifest.anchor)
        for path in deltas:
            apply_delta(state, path)
        shapes = {name: list(bits.shape) for name, bits in state.items()}
        dtypes = {name: dtype for name, dtype in dtypes_in(self._version).items() if dtype != "BF16"}
        return self._version, shapes, dtypes

    def progress(self) -> str:
        """How much `put` has fetched of what it needs, such as "27 of 269 MB"; "" if it fetches nothing."""
        if not (wanted := self._wanted):
            return ""
        try:
            found = sum(path.stat().st_size for at in (self._coming, self._deltas) for path in at.glob("*"))
        except FileNotFoundError:  # meanwhile, a file was finished, or its folder was renamed
            found = 0
        share = _STEPS * min(self._fetched + found, wanted) // wanted
        digits = 0 if wanted >= 10e6 else 1
        return f"{share * wanted / _STEPS / 1e6:.{digits}f} of {wanted / 1e6:.{digits}f} MB"

    def _anchor(self, anchor: AnchorRef) -> Path:
        """Return the anchor's folder, whose name is the sha256 of the first weights file.

        Fetches files that are missing or damaged. If a fetch fails, complete files stay for the next try."""
        if not anchor.weights:
            raise ProtocolError(f"the anchor of version {anchor.version} has no weights")
        kept = self._anchors / anchor.weights[0].sha256
        size = sum(ref.size for ref in anchor.files)
        if all((path := kept / ref.name).is_file() and ref.is_in(path) for ref in anchor.files):
            self._wanted -= size
            return kept
        if kept.exists():
            shutil.rmtree(self._coming, ignore_errors=True)
            kept.rename(self._coming)
        remove_other_files(self._coming, anchor)
        self._reader.fetch_all(anchor.small, self._coming)
        for other in self._anchors.iterdir():  # the disk may have no room for the weights of two anchors
            if other != self._coming:
                shutil.rmtree(other)
        self._reader.fetch_all(anchor.weights, self._coming)
        self._fetched = size
        return self._coming.rename(kept)
