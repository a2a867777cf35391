"""Keeps a folder at a run's newest version, as an ordinary checkpoint for any engine.

    DIR/current -> 00000041      replaced in one step, after the new folder is complete and verified
    DIR/00000041/                config.json, the tokenizer, model.safetensors, and the version's manifest
    DIR/00000040/                the previous version, which the next update removes; readers may still use it
    DIR/.building/               the version that is being built

A reader never sees a half-written version. An update usually downloads only deltas: it copies the folder of
the previous version, and writes the changes into the copy.
"""

import asyncio
import fcntl
import itertools
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from delta_weight_sync import errors
from delta_weight_sync.checkpoint import map_folder
from delta_weight_sync.reader import (
    RunReader,
    apply_delta,
    map_weights,
    remove_other_files,
    require_digest,
)
from delta_weight_sync.records import POLL_S, Manifest, parse
from delta_weight_sync.run import Run
from delta_weight_sync.util import Guard, SafeLogger, make_folder
from delta_weight_sync.watch import Watcher

RECORD: Final = "delta_weight_sync.json"  # the manifest in a version's folder: says which version that is
_WAIT_S: Final = 1.0  # max seconds between two checks whether to stop
_log = SafeLogger(__name__)


@dataclass(frozen=True)
class FollowedVersion:
    """A version that `follow` wrote.

    Attributes:
        manifest: The version's manifest.
        path: The version's folder, an ordinary Hugging Face checkpoint. Removed by the update after the next.
    """

    manifest: Manifest
    path: Path

    def __repr__(self) -> str:
        return f"<FollowedVersion {self.version} in {self.path}, digest {self.digest}>"

    @property
    def version(self) -> int:
        """The version's number."""
        return self.manifest.version

    @property
    def digest(self) -> str:
        """The digest of all weight bits, 16 hex digits."""
        return self.manifest.digest


class FollowedVersions(
    AbstractContextManager["FollowedVersions"], Iterator[FollowedVersion], AsyncIterator[FollowedVersion]
):
    """Iterates over the versions of a run, with `for` or with `async for`; see `follow`."""

    def __init__(self, versions: Generator[FollowedVersion, None, None], stopped: threading.Event) -> None:
        self._versions = versions
        self._stopped = stopped
        self._next_lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<versions of a run, {'stopped' if self._stopped.is_set() else 'as they come'}>"

    def __next__(self) -> FollowedVersion:
        with self._next_lock:
            return next(self._versions)

    async def __anext__(self) -> FollowedVersion:
        try:
            version = await asyncio.to_thread(next, self, None)
        except asyncio.CancelledError:
            self._stopped.set()  # the thread ends its wait, and releases the folder
            raise
        if version is None:
            raise StopAsyncIteration
        return version

    def close(self) -> None:
        """Stop and release the folder, after any download in progress has ended. Thread-safe."""
        self._stopped.set()
        with self._next_lock, suppress(ValueError):  # if `next` runs in this thread, `_stopped` ends it
            self._versions.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def follow(
    run: str | Run,
    into: str | Path,
    *,
    poll_s: float = POLL_S,
    public_key: str | Path | None = None,
    version: int | str | None = None,
    once: bool = False,
    on_error: Callable[[Exception], object] | None = None,
) -> FollowedVersions:
    """Keep `into/current` at the newest version of a run, and yield each version when it is in place.

        for version in follow("hf://buckets/me/wordle#first", into="policy"):
            engine.reload(version.path)

    `into/current` is a link to an ordinary checkpoint. The link is replaced in one step, after the digest of
    the new version is verified. You can kill the program at any moment: the next call keeps the version that
    is there. While you use a version, newer ones are not fetched; the next iteration yields the newest.

    A version that cannot be built is retried at growing intervals; if the folder holds no version yet, an
    older version is built meanwhile. The folder stays locked until the iteration ends. To end it, leave the
    loop, or call `close` if you hold the iterator in a variable.

    Args:
        run: A `Run`, or the URL of one.
        into: The folder. It is created if it does not exist.
        poll_s: Usual seconds between two polls if the store sends no notifications.
        public_key: As for `Run`.
        version: Yield this version only (a number or a tag), then end.
        once: Yield the newest version only, then end.
        on_error: Called with each error after which `follow` tries again. If `follow` had to skip damaged
            records to find the newest version, also called with an error that names these records. Not called
            with the same message twice in a row. An exception in it is logged once, and `follow` goes on; to
            end, it may call `close`. By default, errors are logged.

    Returns:
        An iterator of `FollowedVersion`, for `for` and for `async for`. It is a context manager too.

    Raises:
        ConfigError: `public_key` is set although `run` is a `Run`, or `poll_s` is no number above 0.
        FolderError: From the iteration: another process follows into this folder, or it holds other files.
        DeltaWeightSyncError: From the iteration: the run cannot be opened. With `version` or `once`, any
            other error is raised, too.
    """
    if isinstance(run, Run) and public_key is not None:
        raise errors.ConfigError("public_key applies only to a URL: pass the key to `Run` instead")
    if not isinstance(poll_s, int | float) or not poll_s > 0:
        raise errors.ConfigError(f"poll_s is {poll_s!r}: give a number of seconds above 0")
    stopped = threading.Event()
    complain = on_error or (lambda error: _log.warning("%s", error))
    guard = Guard("the function `on_error`")

    def versions() -> Generator[FollowedVersion, None, None]:
        reader = (run if isinstance(run, Run) else Run(run, public_key=public_key))._reader
        with (
            CheckpointFolder(reader, Path(into)) as folder,
            closing(Watcher(reader, poll_s, folder.held)) as watcher,  # refuses versions older than `held`
        ):
            if version is not None or once:
                manifest = watcher.poll() if version is None else reader.manifest(version)
                assert manifest is not None, "a new watcher's first `poll` returns a version or raises"
                yield FollowedVersion(manifest, folder.update(manifest))
                return
            error: Exception | None = None
            built: list[FollowedVersion] = []
            last_complaint = ""

            def update(manifest: Manifest) -> None:
                built.append(FollowedVersion(manifest, folder.update(manifest)))

            def try_update(manifest: Manifest) -> None:
                update(manifest) if folder.held else reader.try_older(manifest, update)

            while not stopped.is_set():
                try:
                    if watcher.check(try_update):
                        error = watcher.problem()
                except (errors.DeltaWeightSyncError, OSError) as caught:
                    error = caught
                yield from built  # at most one version
                built.clear()
                if error and str(error) != last_complaint:
                    with guard:
                        complain(error)
                last_complaint = str(error or "")
                if not stopped.is_set():
                    watcher.wait(min(poll_s, _WAIT_S))

    return FollowedVersions(versions(), stopped)


def _content(manifest: Manifest) -> tuple[object, ...]:
    """What tells a version's folder from another's, also if a run was started over with the same weights."""
    small = {file.name: file.sha256 for file in manifest.anchor.small}
    return manifest.born, manifest.version, manifest.digest, small


def build(reader: RunReader, manifest: Manifest, into: Path, held: FollowedVersion | None) -> None:
    """Write a version to `into` and verify its digest.

    An anchor is a whole checkpoint in the bucket. If the deltas from `held` take fewer bytes than the
    version's anchor, copy `held` and write the changes into the copy. Otherwise start from the anchor, and
    keep the anchor's files that an earlier, failed try completed."""
    if held is None or not _patched(reader, manifest, into, held):
        remove_other_files(into, manifest.anchor)
        reader.checkout(manifest, into)


def _patched(reader: RunReader, manifest: Manifest, into: Path, held: FollowedVersion) -> bool:
    """Build from the held version. Return False if the version must be built from the anchor instead.

    The anchor is needed if it takes fewer bytes, a file other than the weights differs, deltas from the held
    version are missing, or the result has another digest. (The digest differs if the run was started over, or
    if another program changed the held version.)"""
    recipe = reader.recipe(manifest, held.version)
    both = (held.manifest.anchor, manifest.anchor)
    # Both anchors must have the same file names. The deltas update the files of weights, so their hashes may
    # differ; the hashes of all other files must be the same.
    old, new = ({f.name: "" if f in a.weights else f.sha256 for f in a.files} for a in both)
    if recipe.anchor or not recipe.deltas or old != new:
        return False
    shutil.rmtree(into, ignore_errors=True)
    paths = reader.fetch_all(recipe.deltas, into)
    shutil.copytree(held.path, into, dirs_exist_ok=True)
    try:
        state = map_weights(into, manifest.anchor)
        for path in paths:
            apply_delta(state, path)
        require_digest(state, manifest)
    except (errors.CodecError, errors.ProtocolError, SafetensorError):
        return False
    return True


class CheckpointFolder(AbstractContextManager["CheckpointFolder"]):
    """A folder, created if missing, whose `current` leads to one version of a run.

    The constructor locks the folder; the end of `with` unlocks it. The constructor raises `FolderError` if
    another process has locked the folder, or if the folder holds other files.

    Attributes:
        folder: The folder's absolute path.
        held: The manifest of the verified version behind `current`, or None.
    """

    def __init__(self, reader: RunReader, folder: Path) -> None:
        make_folder(folder)
        if not (folder / ".lock").exists() and any(folder.iterdir()):
            raise errors.FolderError(f"{folder} holds other files: name an empty folder, or a new one")
        self.folder = folder.absolute()
        self._reader = reader
        self._current = self.folder / "current"
        self._building = self.folder / ".building"
        if self._current.is_dir() and not self._current.is_symlink():
            raise errors.FolderError(f"{self._current} is not a link that `follow` made: name another folder")
        self._lock = (folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlocked when this process ends
        except BlockingIOError:
            self._lock.close()
            busy = f"another process is following into {folder}: stop that process, or choose another folder"
            raise errors.FolderError(busy) from None
        shutil.rmtree(self._building, ignore_errors=True)  # a killed process may have left this folder
        self.held = self._verified()

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._building, ignore_errors=True)
        self._lock.close()

    def update(self, manifest: Manifest) -> Path:
        """Build a version, point `current` at it, and return the version's own folder.

        After any `DeltaWeightSyncError` or `OSError`, `current` is unchanged. After `kill -9`, `current`
        leads to the old version or to the new one."""
        held = self.held
        if held is None or _content(held) != _content(manifest):
            for folder in self.folder.iterdir():  # remove older versions
                ours = (folder / RECORD).is_file() and not folder.is_symlink() and folder != self._building
                if ours and folder.resolve() != self._current.resolve():
                    shutil.rmtree(folder)
            held_version = FollowedVersion(held, self._current) if held and self._current.exists() else None
            build(self._reader, manifest, self._building, held_version)
            self._show(manifest)
        return self._current.resolve()

    def _verified(self) -> Manifest | None:
        """Return the manifest of the version behind `current`; None unless all files are as published."""
        try:
            manifest = parse(Manifest, (self._current / RECORD).read_bytes(), RECORD)
            if not all(ref.is_in(self._current / ref.name) for ref in manifest.anchor.small):
                return None
            require_digest(map_folder(self._current), manifest)
        except (OSError, errors.ProtocolError, SafetensorError):
            return None
        return manifest

    def _show(self, manifest: Manifest) -> None:
        """Move the finished version to a free name and point `current` at it. The usual name may be taken,
        because a run that is started over uses the same version numbers again."""
        (self._building / RECORD).write_bytes(manifest.to_bytes())
        name = f"{manifest.version:08d}"
        names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(1)))
        folder = next(path for path in map(self.folder.joinpath, names) if not path.exists())
        self._building.rename(folder)
        link = self.folder / ".current"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self._current)
        self.held = manifest
