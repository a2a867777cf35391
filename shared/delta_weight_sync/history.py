"""Reading a run: HEAD, manifests, verified files, and any version as an ordinary checkpoint.

The codec and the digest are imported where weights are: who only lists versions does not wait for numba.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from delta_weight_sync import checkpoint
from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.heads import NoVersionError, RecordReader, manifests_of
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import AnchorRef, FileRef, ProtocolError
from delta_weight_sync.signing import PublicKeys
from delta_weight_sync.store import Bucket, ObjectMissing, open_bucket
from delta_weight_sync.ways import Way


def split_run(url: str) -> tuple[str, str]:
    """URL of a bucket and name of a run in it, of `hf://buckets/me/wordle#first`; "" where none is named."""
    bucket, _, run = url.partition("#")
    return bucket, run


def open_run(url: str, run: str | None = None, *, public_key: str = "") -> RunReader:
    """Reads the run that `url` names, or `run`, or the only one in the bucket; else `ProtocolError`.

    `public_key`: versions that it has not signed are refused; by default DELTA_WEIGHT_SYNC_PUBLIC_KEY.
    """
    place, named = split_run(url)
    bucket = open_bucket(place)
    believed = PublicKeys(public_key) if public_key else None
    return RunReader(bucket, run or named or _only_run(bucket), believed)


def _only_run(bucket: Bucket) -> str:
    runs = sorted({info.key.split("/")[1] for info in bucket.list("runs/")})
    if len(runs) != 1:
        known = (
            f"it holds {', '.join(runs)}; name one: {bucket.url}#{runs[0]}" if runs else "it holds none yet"
        )
        raise ProtocolError(f"{bucket.url} does not hold exactly one run: {known}")
    return runs[0]


class RunReader(RecordReader):
    """The reading half of the protocol. Everything it returns was checked against HEAD's chain of hashes."""

    def __init__(self, bucket: Bucket, run: str, believed: PublicKeys | None = None) -> None:
        """As a `RecordReader`."""
        super().__init__(bucket, run, believed)
        self._unreadable: set[str] = set()  # keys of files that were gone or damaged when they were fetched

    def history(self) -> Iterator[Manifest]:
        """Every manifest from the newest back to version 0, or to the oldest that was not deleted."""
        manifest = self.newest()
        while manifest is not None:
            yield manifest
            manifest = self.parent(manifest)

    def parent(self, manifest: Manifest) -> Manifest | None:
        """The manifest of the version before; None for version 0, and where that one was deleted."""
        try:
            return self.manifest(manifest.parent) if manifest.parent else None
        except ObjectMissing:
            return None

    def at(self, version: int | None = None) -> Manifest:
        """The manifest of `version` (None: the newest); raises `ProtocolError` where there is none."""
        manifest = None
        for manifest in self.history():
            if version in (None, manifest.version):
                return manifest
        place = f"run {self.keys.run!r} in {self.bucket.url}"
        if manifest and version is not None and 0 <= version < manifest.version:
            raise deleted(place, version, manifest.version)
        wanted = "a first version" if version is None else f"version {version}"
        raise NoVersionError(f"{place} has not published {wanted}")

    def find(self, version: int) -> Manifest:
        """As `at`, by one listing instead of HEAD's chain, however long the run is.

        HEAD's hashes do not cover it: prove by the digest of the weights that it is the published version.
        """
        newest = self.newest()
        if newest and version <= newest.version and (found := self.published(version, newest.born)):
            return found
        if newest and 0 <= version < newest.version:
            oldest = min(manifests_of(self.bucket.list(self.keys.manifests)), default=newest.version)
            raise deleted(f"run {self.keys.run!r}", version, oldest)
        known = f"its newest is version {newest.version}" if newest else "it has none yet"
        raise ProtocolError(f"run {self.keys.run!r} has no version {version}, {known}")

    def fetch(self, ref: FileRef, folder: Path) -> Path:
        """Download one file and check its size and sha256 (Xet downloads check nothing themselves).

        One that is there already, and whole, stays.
        """
        path = folder / ref.name
        if path.is_file() and ref.is_in(path):
            return path
        try:
            self.bucket.fetch(ref.key, path, ref.size)
            if not ref.is_in(path):
                path.unlink()
                raise ref.damaged()
        except (ObjectMissing, ProtocolError):
            self._unreadable.add(ref.key)
            raise
        self._unreadable.discard(ref.key)
        return path

    def way(self, manifest: Manifest, held: int | None = None) -> Way:
        """As the manifest's; around files that could not be read whole, where there is such a way."""
        return manifest.way_without(self._unreadable, held) or manifest.way(held)

    def buildable(self, manifest: Manifest) -> Manifest | None:
        """`manifest`, or the newest before it that needs none of the files which could not be read whole.

        None where there is no such version.
        """
        found: Manifest | None = manifest
        while found and not found.way_without(self._unreadable):
            found = self.parent(found)
        return found

    def checkout(self, manifest: Manifest, folder: Path) -> dict[str, Bits]:
        """Write `manifest`'s version to `folder` as a Hugging Face checkpoint; returns its weights' bits.

        By the cheapest way from its anchor; the digest is checked before the weights are written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for ref in manifest.anchor.small_first():
            self.fetch(ref, folder)
        with reading(manifest.anchor):
            state = dict(checkpoint.read_bits(folder))
        for delta in self.way(manifest).deltas:
            self.advance(state, delta, folder)
        require_digest(state, manifest)
        shapes = {name: bits.shape for name, bits in state.items()}
        checkpoint.write_bits(shapes, state.__getitem__, folder / checkpoint.WEIGHTS)
        return state

    def advance(self, state: dict[str, Bits], ref: FileRef, folder: Path) -> None:
        """Apply one delta file to `state` in place; `folder` is scratch space."""
        path = self.fetch(ref, folder)
        apply_delta(state, path)
        path.unlink()


def leave_only(folder: Path, anchor: AnchorRef) -> None:
    """Make `folder` if it is missing, and remove from it what no file of `anchor` is called like."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {ref.name for ref in anchor.files}
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in names:
            path.unlink()


@contextmanager
def reading(anchor: AnchorRef) -> Iterator[None]:
    """Turns what files provoke that are no checkpoint into a `ProtocolError` that names the anchor."""
    try:
        yield
    except (SafetensorError, ValueError, LookupError) as error:
        raise ProtocolError(f"the anchor of version {anchor.version} is not a checkpoint: {error}") from error


def apply_delta(state: dict[str, Bits], path: Path) -> None:
    """Apply the delta file `path` to `state` in place; raises `CodecError` naming the file.

    `state` is then to be thrown away: it may hold a part of the changes.
    """
    from delta_weight_sync import codec

    shapes = {name: bits.shape for name, bits in state.items()}
    for patch in codec.Delta(path).patches(shapes, state.__getitem__):
        codec.apply(patch, state[patch.name])


def deleted(place: str, version: int, oldest: int) -> ProtocolError:
    """The error for a version that the run holds no more."""
    return ProtocolError(f"{place} holds version {version} no more: the oldest that was kept is {oldest}")


def require_digest(state: dict[str, Bits], manifest: Manifest) -> None:
    """Raise `ProtocolError` unless `state` is exactly the published bits of the manifest's version."""
    from delta_weight_sync.digest import state_digest, to_hex

    digest = to_hex(state_digest(state))
    if digest != manifest.digest:
        raise ProtocolError(
            f"version {manifest.version} has digest {manifest.digest}, its files give {digest}; "
            "the run is damaged, continue from an earlier version"
        )
