"""A folder that holds a run's newest version as an ordinary checkpoint, which no reader ever sees torn.

    DIR/current -> 00000041      replaced in one step, when the version behind it is whole and proven
    DIR/00000041/                config.json, the tokenizer, model.safetensors, and the version's manifest
    DIR/00000040/                the version before, for who still reads it; gone when the next is built
    DIR/.building/               what nobody reads yet

A version is a copy of the one before with the changes written into it, so that it costs its deltas to fetch
and a copy on the disk. Writing into the old file would save little: where one weight in a hundred changes,
next to no page of the file stays as it was.
"""

from __future__ import annotations

import fcntl
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from safetensors import SafetensorError

from delta_weight_sync.checkpoint import WEIGHTS, map_bits
from delta_weight_sync.codec import CodecError
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.history import RunReader, apply_delta, leave_only, require_digest
from delta_weight_sync.protocol import Manifest, parse
from delta_weight_sync.refs import FileRef, ProtocolError

RECORD: Final = "delta_weight_sync.json"  # the manifest, beside the weights: which version a folder holds


class FolderError(DeltaWeightSyncError):
    """This folder cannot be kept: another process does, or it holds something else."""


@contextmanager
def kept_checkpoint(reader: RunReader, folder: Path) -> Iterator[KeptCheckpoint]:
    """Keep `folder`, which is made where it is missing; meanwhile no other process can.

    Raises `FolderError`, and `OSError` of the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        kept = KeptCheckpoint(reader, folder)
        try:
            yield kept
        finally:
            kept.clear()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """A lock that ends with this process, however it ends."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(f"another process keeps {folder}: end it, or name another folder") from None
        yield


class Built(NamedTuple):
    """A version that was proven, and the folder that holds it."""

    manifest: Manifest
    folder: Path


def build(reader: RunReader, manifest: Manifest, into: Path, held: Built | None) -> None:
    """Write `manifest`'s version to `into`, and prove it by its digest; whole files of a failed try stay.

    It is a copy of what is `held` with the changes written into it, where that takes fewer bytes to fetch
    than an anchor; `held` may be any version. Raises as `KeptCheckpoint.take`.
    """
    if held is None or not _patched(reader, manifest, into, held):
        leave_only(into, manifest.anchor)
        reader.checkout(manifest, into)
        require_digest(map_bits(into / WEIGHTS), manifest)


def _patched(reader: RunReader, manifest: Manifest, into: Path, held: Built) -> bool:
    """Build from what is held; False where that does not lead there, or is not the cheapest way.

    So it is where the run was started over, or where somebody has written into the held version.
    """
    way = reader.way(manifest, held.manifest.version)
    if way.anchor or not way.deltas or _contents(held.manifest) != _contents(manifest):
        return False
    shutil.rmtree(into, ignore_errors=True)
    paths = [reader.fetch(delta, into) for delta in way.deltas]
    shutil.copytree(held.folder, into, dirs_exist_ok=True)
    state = map_bits(into / WEIGHTS, "r+")
    try:
        for path in paths:
            apply_delta(state, path)
            path.unlink()
    except CodecError:
        return False
    return to_hex(state_digest(state)) == manifest.digest


class KeptCheckpoint:
    """A folder at one version of a run; see `kept_checkpoint`."""

    def __init__(self, reader: RunReader, folder: Path) -> None:
        """Find out what `folder` holds, by reading all of it."""
        self.folder = folder.absolute()
        self._reader = reader
        self._current, self._building = self.folder / "current", self.folder / ".building"
        if self._current.is_dir() and not self._current.is_symlink():
            raise FolderError(f"{self._current} is a folder, not a link of ours: name another folder")
        self.clear()
        self.held = self._found()  # what `current` holds, proven by digest

    def take(self, manifest: Manifest) -> Path:
        """Put `manifest`'s version behind `current`; returns the folder that it is in.

        After any error, and after `kill -9`, `current` is what it was. Raises `BucketError`, `ProtocolError`
        and `CodecError` of the run, and `OSError` of the disk.
        """
        held = self.held
        if held is None or (held.version, held.digest) != (manifest.version, manifest.digest):
            self._remove_older()
            build(self._reader, manifest, self._building, Built(held, self._current) if held else None)
            self._show(manifest)
        return self._current.resolve()

    def instead_of(self, manifest: Manifest) -> Manifest | None:
        """After `take` could not read a file of it: what to take meanwhile, where nothing is held yet."""
        older = None if self.held else self._reader.buildable(manifest)
        return older if older != manifest else None

    def _found(self) -> Manifest | None:
        """What `current` holds, or None where that is not exactly what was published."""
        try:
            manifest = parse(Manifest, (self._current / RECORD).read_bytes(), RECORD)
            for ref in _assets(manifest):
                ref.check((self._current / ref.name).read_bytes())
            require_digest(map_bits(self._current / WEIGHTS), manifest)
        except (OSError, ProtocolError, SafetensorError):
            return None
        return manifest

    def clear(self) -> None:
        """Remove what is being built, here or by a process that was killed."""
        shutil.rmtree(self._building, ignore_errors=True)

    def _remove_older(self) -> None:
        """Remove all versions but the one that is current."""
        current = self._current.resolve()
        for folder in self.folder.iterdir():
            ours = (folder / RECORD).is_file() and not folder.is_symlink()
            if ours and folder.resolve() != current and folder != self._building:
                shutil.rmtree(folder)

    def _show(self, manifest: Manifest) -> None:
        """Let readers see what was built."""
        (self._building / RECORD).write_bytes(manifest.to_bytes())
        folder = self._free_name(manifest.version)
        self._building.rename(folder)
        link = self.folder / ".current"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self._current)
        self.held = manifest

    def _free_name(self, version: int) -> Path:
        """A run that was started over has this version once more, while `current` is still the other one."""
        names = itertools.chain([f"{version:08d}"], (f"{version:08d}.{n}" for n in itertools.count(1)))
        return next(path for path in map(self.folder.joinpath, names) if not path.exists())


def _assets(manifest: Manifest) -> list[FileRef]:
    """The files of a checkpoint beside its weights."""
    return [ref for ref in manifest.anchor.files if ref.name != WEIGHTS]


def _contents(manifest: Manifest) -> set[tuple[str, str]]:
    return {(ref.name, ref.sha256) for ref in _assets(manifest)}
