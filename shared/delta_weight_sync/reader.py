"""Reads a run: HEAD, manifests, verified files, and any version as an ordinary checkpoint.

Each writer (a trainer) has a HEAD, a small record that names its newest version. Each version has a manifest,
which names the files that can build the version: an anchor, which is a whole checkpoint, and deltas. A recipe
is a choice of these files that is enough. The codec and the digest are imported only where weights are
handled: listing versions does not need numba.
"""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError

from delta_weight_sync import checkpoint, errors, records
from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.records import (
    HEAD_BYTES,
    MANIFEST_BYTES,
    TAG_BYTES,
    AnchorRef,
    DeltaRef,
    FileRef,
    Head,
    Keys,
    Manifest,
    Rank,
    Recipe,
    Tag,
    Writer,
    sha256_together,
)
from delta_weight_sync.signing import Kind, PublicKeys
from delta_weight_sync.store import SMALL, Bucket, Listing, ObjectInfo, file_sha256, open_bucket, replacing
from delta_weight_sync.util import in_order

SIDE_BY_SIDE = 6  # files that are fetched at the same time
_TRIES = 5  # attempts to list and read the HEADs; a new writer may remove a HEAD in between
# What a search for the newest version reads at most: anybody who may write to the bucket could add forged
# HEADs and manifests. Usually a search reads one or two of each.
_MAX_HEADS = 16
_MAX_MANIFESTS = 32
_MAX_MANIFEST_BYTES = 8 << 20  # of all these manifests
_LIMITS = {Head: HEAD_BYTES, Manifest: MANIFEST_BYTES, Tag: TAG_BYTES}
Problems = dict[str, Exception]  # records that a search for a valid record skipped: key -> error


def split_run(url: str) -> tuple[str, str]:
    """Split `hf://buckets/me/wordle#first` into the bucket's URL and the run's name ("" if there is none)."""
    if not isinstance(url, str):
        example = "hf://buckets/<owner>/<name>#<run>"
        if isinstance(url, Path):
            example = f"{url.absolute().as_uri()}#<run>"
        raise errors.ConfigError(f"the URL of a run is of type {type(url).__name__}: write text, {example!r}")
    bucket, _, run = url.partition("#")
    return bucket, run


def open_run(url: str, run: str | None = None, *, public_key: str | Path | None = None) -> "RunReader":
    """Open a run for reading. Arguments and errors are those of the public class `Run`."""
    place, named = split_run(url)
    if run and named and run != named:
        raise errors.ConfigError(f"the URL names run {named!r}, and --run names {run!r}: name one")
    bucket = open_bucket(place)
    run = run or named
    if not run:
        run, *others = runs_in(bucket) or [""]
        if others or not run:
            names = ", ".join([run, *others])
            known = f"it holds {names}; name one: {bucket.url}#{run}" if run else "it holds none yet"
            raise errors.ProtocolError(f"{bucket.url} does not hold exactly one run: {known}")
    return RunReader(bucket, run, PublicKeys.load(public_key))


def runs_in(bucket: Bucket) -> list[str]:
    """Names of the runs in a bucket."""
    found = (re.match(f"runs/({records.RUN_NAME})/", info.key) for info in bucket.list("runs/"))
    return sorted({match[1] for match in found if match})


class _Budget:
    """How many manifests a search may still read, and how many bytes of them."""

    def __init__(self) -> None:
        self._manifests = _MAX_MANIFESTS
        self._bytes = _MAX_MANIFEST_BYTES

    def spend(self, size: int) -> bool:
        """Whether a manifest of `size` bytes may be read; if so, count it."""
        if size > min(MANIFEST_BYTES, self._bytes) or not self._manifests:
            return False
        self._manifests -= 1
        self._bytes -= size
        return True


class RunReader:
    """The reading half of the protocol.

    The reader checks that each record is complete and belongs to this run. If another record names the sha256
    of the record, the reader checks it. If there are trusted keys, one of them must have signed the record.

    Args:
        bucket: The bucket that holds the run.
        run: Name of the run.
        public_keys: The trusted keys; by default, as for `open_run`.
    """

    def __init__(self, bucket: Bucket, run: str, public_keys: PublicKeys | None = None) -> None:
        self.bucket = bucket
        self.keys = Keys(run)
        self.public_keys = PublicKeys.load() if public_keys is None else public_keys
        self._unreadable = set[str]()  # keys of files that were missing or damaged at their last fetch
        self._ahead: dict[str, Future[bytes]] = {}  # objects that are fetched before anything needs them
        self._pool = ThreadPoolExecutor(SIDE_BY_SIDE, "fetch-ahead")
        self.place = f"run {run!r} in {bucket.url}"  # for messages

    def __repr__(self) -> str:
        return f"<RunReader of {self.bucket.url}#{self.keys.run}>"

    def newest(self) -> Manifest | None:
        """The newest version's manifest, or None before the first version."""
        head = self.head()
        return self.resolve(head) if head else None

    def manifest(self, version: int | str | None = None) -> Manifest:
        """The manifest of `version` (a number or a tag), by default the newest.

        The reader finds an older manifest in a listing. It does not follow the chain of hashes that begins at
        HEAD. So check the digest of the weights that you build from the manifest, as `checkout` does.

        Raises:
            NoVersionError: The run has not published this version, or has no such tag.
            ProtocolError: The version was deleted, or a record is damaged or not signed by a trusted key.
            ConfigError: `version` is neither a number nor a possible tag.
        """
        run = self.keys.run
        version = number_or_tag(version)
        newest = self.newest()
        if newest is None:
            others = ", ".join(other for other in runs_in(self.bucket) if other != run)
            known = f"; the bucket holds {others}" if others else ""
            raise errors.NoVersionError(f"{self.place} has not published a first version{known}")
        if isinstance(version, str):
            return self._tagged(version, newest)
        if version in (None, newest.version):
            return newest
        if not 0 <= version < newest.version:
            raise errors.NoVersionError(
                f"run {run!r} has no version {version}; its newest is version {newest.version}"
            )
        unsigned: errors.SignatureError | None = None
        listed = sorted(_manifests(info.key for info in self.bucket.list(self.keys.manifests)), reverse=True)
        for key in (key for parts, key in listed if parts.version == version):
            try:
                manifest = self.read_listed(key)
            except errors.SignatureError as error:
                unsigned = unsigned or error
                continue
            if manifest.born == newest.born:  # else the manifest is of an earlier run with the same name
                return manifest
        # Below the oldest version there may be versions that tags keep.
        newer = (parts.version for parts, _ in listed if parts.version > version)
        oldest = min(newer, default=newest.version)
        raise unsigned or no_longer_held(f"run {run!r}", version, oldest)

    def tag(self, name: str, newest: Manifest) -> Tag:
        """Read and check a tag; `newest` is the run's newest manifest.

        Raises:
            NoVersionError: The run has no such tag.
            SignatureError: The run is signed, but the tag is not, or no trusted key signed it.
            ProtocolError: The tag is damaged, or of an earlier run with the same name.
            ConfigError: `name` cannot be a tag.
        """
        key = self.keys.tag(name)
        try:
            tag = self.read(Tag, key)
        except errors.ObjectMissingError:
            fix = f"`delta-weight-sync tag {self.bucket.url}#{self.keys.run}` lists the tags"
            raise errors.NoVersionError(f"run {self.keys.run!r} has no tag {name!r}: {fix}") from None
        if tag.name != name:
            raise errors.ProtocolError(f"{key} is a copy of tag {tag.name!r}: set it again, or remove it")
        if newest.signature and not tag.signature:  # a reader without keys cannot check more than that
            raise errors.SignatureError(
                f"{key} has no signature, but the run's versions have: set it again with the trainer's key"
            )
        if tag.born != newest.born:
            raise errors.ProtocolError(
                f"tag {name!r} is of an earlier run of this name: set it again, or remove it"
            )
        return tag

    def _tagged(self, name: str, newest: Manifest) -> Manifest:
        tag = self.tag(name, newest)
        try:
            return self.read(Manifest, tag.manifest)
        except errors.ObjectMissingError:
            raise errors.ProtocolError(
                f"version {tag.version}, which has the tag {name!r}, was deleted: tag another version"
            ) from None

    def versions(self) -> Iterator[Manifest]:
        """Every manifest from the newest back to version 0, or to the oldest that was not deleted."""
        manifest = self.newest()
        while manifest is not None:
            yield manifest
            manifest = self.parent(manifest)

    def parent(self, manifest: Manifest) -> Manifest | None:
        """The manifest of the version before. None for version 0, or if that manifest was deleted."""
        try:
            return self.read(Manifest, manifest.parent) if manifest.parent else None
        except errors.ObjectMissingError:
            return None

    def recipe(self, manifest: Manifest, held: int | None = None) -> Recipe:
        """Like `Manifest.recipe`, but without files that could not be read, if they can be avoided."""
        return manifest.recipe_without(self._unreadable, held) or manifest.recipe(held)

    def readable(self, manifest: Manifest) -> Manifest | None:
        """The newest version up to `manifest` that can be built from readable files, if any."""
        found: Manifest | None = manifest
        while found and not found.recipe_without(self._unreadable):
            found = self.parent(found)
        return found

    def below_gap(self, newest: Manifest, gap: int, infos: Mapping[str, ObjectInfo]) -> Manifest | None:
        """The newest version below `gap` whose files are all among the run's objects `infos`, or None."""
        listed = manifests_of([*infos.values()])
        numbers = sorted((number for number in listed if number < gap), reverse=True)
        below = (self.read_listed(listed[number].key) for number in numbers)
        whole = (m for m in below if m.born == newest.born and all(f.key in infos for f in m.recipe().files))
        return next(whole, None)

    def try_older(self, manifest: Manifest, use: Callable[[Manifest], object]) -> None:
        """Call `use` with a version. If `use` finds a damaged or missing file, also call `use` with the
        newest earlier version that can be built from readable files: an older version is better than none.
        Raise the error even if the older version works, so that the caller learns of the damage."""
        try:
            use(manifest)
        except (errors.ProtocolError, errors.ObjectMissingError):
            if (older := self.readable(manifest)) and older != manifest:
                with contextlib.suppress(errors.ProtocolError, errors.ObjectMissingError):
                    self.try_older(older, use)
            raise

    def fetch_ahead(self, keys: Iterable[str]) -> None:
        """Begin to read small objects in parallel. Each is checked as usual when it is used."""
        self._ahead = {key: self._ahead.get(key) or self._pool.submit(self.bucket.get, key) for key in keys}

    def _fetched_ahead(self, key: str) -> bytes | None:
        """Hand out an object that was fetched ahead. None if it was not fetched, or if the fetch failed."""
        ahead = self._ahead.pop(key, None)
        with contextlib.suppress(errors.BucketError, errors.ProtocolError):
            return ahead.result() if ahead else None
        return None

    def fetch(self, ref: FileRef, folder: Path) -> Path:
        """Download a file and check its size and sha256. A complete local copy is not fetched again.

        `ref` must not be one of several parts of a delta or a jump: see `fetch_all`.

        Raises:
            ProtocolError: The object is damaged.
            ObjectMissingError: The object does not exist.
        """
        self.fetch_all([ref], folder)
        return folder / ref.name

    def _fetch(self, ref: FileRef, folder: Path) -> str:
        """Like `fetch`, but return the sha256, which is not checked for a part: only the hash of all parts
        together is known."""
        path = folder / ref.name
        is_part = isinstance(ref, DeltaRef) and ref.parts > 1
        if path.is_file() and path.stat().st_size == ref.size:
            sha256 = file_sha256(path)
            if is_part or sha256 == ref.sha256:
                return sha256
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if data := self._fetched_ahead(ref.key):
                path.write_bytes(data)
                sha256 = hashlib.sha256(data).hexdigest()
            else:
                sha256 = self.bucket.fetch(ref.key, path, ref.size)
            if not is_part and sha256 != ref.sha256:
                path.unlink()
                raise ref.damaged()
        except (errors.ObjectMissingError, errors.ProtocolError):
            self._unreadable.add(ref.key)
            raise
        self._unreadable.discard(ref.key)
        return sha256

    def fetch_all(self, refs: Iterable[FileRef], folder: Path) -> list[Path]:
        """Like `fetch`, several files at a time. Returns the paths in the order of `refs`.

        All parts of a delta or a jump must be fetched together.
        """
        wanted = [*refs]
        kept = {ref.key for ref in wanted if (folder / ref.name).exists()}
        hashes = self._fetch_side_by_side(wanted, folder)
        by_link: dict[tuple[int, int], list[tuple[DeltaRef, str]]] = {}
        for ref, sha256 in zip(wanted, hashes, strict=True):
            if isinstance(ref, DeltaRef) and ref.parts > 1:
                by_link.setdefault((ref.base, ref.version), []).append((ref, sha256))
        for (base, version), parts in by_link.items():
            first, _ = parts[0]
            if len(parts) != first.parts or sha256_together(sha for _, sha in parts) != first.sha256:
                for ref, _ in parts:
                    (folder / ref.name).unlink()
                if not kept.isdisjoint(ref.key for ref, _ in parts):
                    # Perhaps only a local copy is damaged.
                    self.fetch_all([ref for ref, _ in parts], folder)
                    continue
                self._unreadable.update(ref.key for ref, _ in parts)
                raise errors.ProtocolError(
                    f"the {first.parts} parts of the delta from version {base} to {version} (such as"
                    f" {first.key}) are not the published objects: they were not applied"
                )
        return [folder / ref.name for ref in wanted]

    def _fetch_side_by_side(self, wanted: list[FileRef], folder: Path) -> list[str]:
        if len(wanted) < 2:
            return [self._fetch(ref, folder) for ref in wanted]
        places = ((ref, folder / ref.name) for ref in wanted)
        lacking = [(ref.key, path, ref.size) for ref, path in places if not path.exists()]
        for _, path, _ in lacking:
            path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(errors.BucketError):  # `fetch` then says which file cannot be read
            self.bucket.fetch_together(lacking)
        with ThreadPoolExecutor(SIDE_BY_SIDE, "fetch") as pool:  # these threads end with the fetch
            # After an error, `map` begins no further file.
            return list(pool.map(lambda ref: self._fetch(ref, folder), wanted))

    def fetch_anchor(self, anchor: AnchorRef, folder: Path) -> None:
        """Fetch an anchor's files: first the small ones, then the weights if no small file is damaged.

        This method first deletes the weight files in `folder` that this anchor does not name. An earlier
        anchor, which was divided into other files, left them, and a loader would load them, too.

        Raises `ProtocolError` if the anchor has no weights, or a file is damaged.
        """
        if not anchor.weights:
            raise errors.ProtocolError(f"the anchor of version {anchor.version} has no weights")
        folder.mkdir(parents=True, exist_ok=True)
        names = {ref.name for ref in anchor.files}
        for path in folder.glob("model*.safetensors*"):  # matches the index, too
            if path.name not in names:
                path.unlink()
        self.fetch_all(anchor.small, folder)
        self.fetch_all(anchor.weights, folder)

    def checkout(self, manifest: Manifest, folder: Path) -> dict[str, Bits]:
        """Write a version to `folder` as a Hugging Face checkpoint.

        The reader fetches the anchor, then all deltas. Only then does it apply the deltas to the anchor's
        files, in place. So memory never holds the model. If a download fails, the next call reuses the files
        of the anchor that are complete.

        Returns:
            The weights, mapped from the files: tensor name -> words (see `checkpoint`), usually the bf16 bits
            as uint16, in the tensor's shape. Writing to them changes the files. They are valid until you
            write another version to `folder`.

        Raises:
            ProtocolError, CodecError: A file is damaged, or the digest is not the published one.
        """
        self.fetch_anchor(manifest.anchor, folder)
        state = map_weights(folder, manifest.anchor)
        with TemporaryDirectory(prefix=".deltas-", dir=folder) as scratch:
            self.apply(state, self.recipe(manifest).deltas, Path(scratch))
        require_digest(state, manifest)
        return state

    def apply(self, state: dict[str, Bits], deltas: Iterable[FileRef], folder: Path) -> None:
        """Fetch delta files to a scratch folder; apply them in order to `state` (name -> bits), in place."""
        for path in self.fetch_all(deltas, folder):
            apply_delta(state, path)

    def require_intact(self) -> None:
        """Raise `ProtocolError` or `ObjectMissingError` if the last writer's HEAD or manifest is damaged."""
        if writers := self.writers():
            head = self.head_of(writers[-1])
            if head.manifest:
                self.read(Manifest, head.manifest)

    def writers(self) -> list[Writer]:
        """All writers that have a HEAD, sorted. The last writer owns the run."""
        found = (records.head_writer(info.key) for info in self.bucket.list(self.keys.heads))
        return sorted(writer for writer in found if writer)

    def successor(self, of: Writer, born: float | None, problems: Problems) -> Writer | None:
        """The last writer that took the run over from `of`, or None.

        With trusted keys, a writer does not count if its HEAD is damaged or unsigned, or names a version of a
        run that was created before `born`. `problems` receives the damaged and unsigned HEADs.
        """
        for writer in reversed(self.writers()):
            if writer <= of:
                return None
            if not self.public_keys:
                return writer
            try:
                head = self.head_of(writer)
            except errors.ObjectMissingError:  # an even later writer removed it
                return writer
            except errors.ProtocolError as error:
                problems[self.keys.head(writer)] = error
            else:
                if head.version is None or born is None or head.born >= born:
                    return writer
        return None

    def head(
        self, below: Writer | None = None, floor: Rank | None = None, problems: Problems | None = None
    ) -> Head | None:
        """The HEAD of the writer that owns the run, or None if there is no readable HEAD and no complete
        version.

        If a HEAD is damaged or not signed, the reader rebuilds it from the manifests of its writer. If that
        writer has no complete version, the HEAD of the writer before counts. If no HEAD is left, the reader
        makes a HEAD for the newest complete version of all writers.

        Args:
            below: Only consider writers before this one.
            floor: The oldest version to accept, as a `records.Rank`. An older HEAD counts as damaged.
            problems: Receives the HEADs that were skipped.

        Raises:
            ProtocolError: All HEADs are damaged, unsigned or older than `floor`, and none can be rebuilt.
                Without `floor`, if all are damaged and none is unsigned, the result is None instead.
        """
        for _ in range(_TRIES):
            skipped: Problems = {}
            with contextlib.suppress(errors.ObjectMissingError):
                head = self._last_valid(below, floor, skipped)
                why = [e for e in skipped.values() if floor or isinstance(e, errors.SignatureError)]
                if head is None and why:
                    raise type(why[0])("; ".join(map(str, why)))
                if problems is not None:
                    problems.update(skipped)
                return head
        place = f"{self.bucket.url}/{self.keys.heads}"
        raise errors.BucketUnreachableError(f"the listing of {place} names missing HEADs: try again later")

    def _last_valid(self, below: Writer | None, floor: Rank | None, skipped: Problems) -> Head | None:
        writers = [writer for writer in self.writers() if below is None or writer < below]
        listing: Listing | None = None
        budget = _Budget()
        for writer in reversed(writers[-_MAX_HEADS:]):
            try:
                return self.head_of(writer, floor)
            except errors.ProtocolError as error:
                skipped[self.keys.head(writer)] = error
                listing = listing or self.bucket.list(self.keys.folder)
                rebuilt = self.rebuild_head(writer, listing, budget)
                if rebuilt and (floor is None or rebuilt.rank >= floor):
                    return rebuilt
        rebuilt = self.rebuild_head(None, listing, budget)
        if rebuilt and floor and rebuilt.rank < floor:
            skipped[self.keys.heads] = went_back(f"HEAD of run {self.keys.run!r}", rebuilt.version, floor)
            return None
        return rebuilt

    def head_of(self, writer: Writer, floor: Rank | None = None) -> Head:
        """A writer's HEAD. Raises `ObjectMissingError`, or `ProtocolError` (damaged, or below `floor`)."""
        key = self.keys.head(writer)
        head = self.read(Head, key)
        if (head.writer_term, head.writer) != writer:
            raise errors.ProtocolError(f"{key} is the HEAD of another writer: it was not used")
        if floor and head.rank < floor:
            raise went_back(key, head.version, floor)
        return head

    def rebuild_head(
        self,
        writer: Writer | None = None,
        listing: Listing | None = None,
        budget: _Budget | None = None,
    ) -> Head | None:
        """Make a HEAD for the newest complete version (of `writer`, if given); None if `budget` lets it read
        no such version. A version is complete if the files of its recipe are in the bucket."""
        budget = budget or _Budget()
        there = {info.key: info.size for info in listing or self.bucket.list(self.keys.folder)}
        listed = [each for each in _manifests(there) if writer is None or each[0].written_by(writer)]
        for _, key in sorted(listed, reverse=True):
            if not budget.spend(there[key]):
                continue
            try:
                manifest = self.read_listed(key)
            except (errors.ProtocolError, errors.ObjectMissingError):
                continue
            if all(there.get(file.key) == file.size for file in manifest.recipe().files):
                same = manifest.model_dump(include={"run", "born", "version", "writer_term", "writer"})
                return Head(**same, manifest=records.reference(key, manifest))
        return None

    def resolve(self, head: Head, problems: Problems | None = None) -> Manifest | None:
        """The manifest that `head` names. If that is damaged or missing, `problems` receives the error, and
        the result is the manifest of the newest complete version."""
        if head.manifest is None:
            return None
        try:
            return self.read(Manifest, head.manifest)
        except (errors.ProtocolError, errors.ObjectMissingError) as error:
            if problems is not None:
                problems[head.manifest.key] = error
            rebuilt = self.rebuild_head()
            if rebuilt is None or rebuilt.manifest is None:
                raise
            return self.read(Manifest, rebuilt.manifest)

    def read_listed(self, key: str) -> Manifest:
        """The manifest at a listed key. No record names its sha256, so its version and writer are checked."""
        manifest = self.read(Manifest, key)
        if key != self.keys.manifest(manifest.version, Writer(manifest.writer_term, manifest.writer)):
            raise errors.ProtocolError(f"{key} holds the manifest of another version: it was not used")
        return manifest

    def read(self, kind: type[Kind], source: str | FileRef) -> Kind:
        """Read a record of this run, by its key or by a reference, and check it.

        Raises:
            SignatureError: No trusted key signed the record.
            ProtocolError: The record is damaged, or belongs to another run.
        """
        key = source.key if isinstance(source, FileRef) else source
        limit = _LIMITS.get(kind, SMALL)
        data = self._fetched_ahead(key) or self.bucket.get(key, limit)
        if len(data) > limit:  # it was fetched ahead
            raise errors.ProtocolError(f"{key} has {len(data)} bytes, but at most {limit} are allowed")
        if isinstance(source, FileRef):
            source.check(data)
        record = records.parse(kind, data, key)
        if record.run != self.keys.run:
            raise errors.ProtocolError(f"{key} belongs to run {record.run!r}: it was not used")
        self.public_keys.signer(record, key)
        return record


def went_back(what: str, version: int | None, floor: Rank) -> errors.ProtocolError:
    """The error for a record that is older than a version seen before."""
    return errors.ProtocolError(
        f"{what} went back from version {floor[-1]} to {version}: it was not followed; if the run was started"
        " over, heal this replica, or follow into an empty folder"
    )


def no_longer_held(place: str, version: int, oldest: int) -> errors.ProtocolError:
    """The error for a version that was deleted."""
    return errors.ProtocolError(f"{place} no longer has version {version}; the oldest available is {oldest}")


def number_or_tag(version: int | str | None) -> int | str | None:
    """A version as a number if its text is one, which no tag can be."""
    return int(version) if isinstance(version, str) and re.fullmatch(r"[0-9]+", version) else version


def manifests_of(objects: Listing) -> dict[int, ObjectInfo]:
    """Version -> its manifest in the listing. If several writers published a version, the last one counts."""
    known = {info.key: info for info in objects}
    return {parts.version: known[key] for parts, key in sorted(_manifests(known))}


def _manifests(keys: Iterable[str]) -> Iterator[tuple[records.VersionKey, str]]:
    parsed = ((records.version_key(key), key) for key in keys if key.endswith(".json"))
    return ((parts, key) for parts, key in parsed if parts and parts.kind == "manifests")


def remove_other_files(folder: Path, wanted: AnchorRef | Recipe) -> None:
    """Create `folder` if needed. Remove everything in it except the files in `wanted`."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {folder / ref.name for ref in wanted.files}
    kept |= {parent for path in kept for parent in path.parents}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if path not in kept:
                shutil.rmtree(path)
        elif path not in kept:
            path.unlink()


def map_weights(folder: Path, anchor: AnchorRef) -> dict[str, Bits]:
    """Map the weights in a version's files, so that changes of the weights change the files. A file that is a
    link is copied first, because changes of the weights would change another file, such as a Hub cache's.
    Raises `ProtocolError`, which names the anchor, if the anchor's files are not a checkpoint."""
    paths = [folder / ref.name for ref in anchor.weights]
    for path in paths:
        if path.is_symlink() or path.stat().st_nlink > 1:
            with replacing(path) as copy:
                shutil.copyfile(path, copy)
    try:
        files = [checkpoint.map_bits(path, "r+") for path in paths]
        return {name: bits for file in files for name, bits in file.items()}
    except (SafetensorError, errors.CheckpointError, ValueError, LookupError) as error:
        raise errors.ProtocolError(
            f"the anchor of version {anchor.version} is not a checkpoint: {error}"
        ) from error


def apply_delta(state: dict[str, Bits], path: Path) -> None:
    """Apply a delta file to `state` (name -> bits of each tensor) in place, then delete the file.

    Raises `CodecError` if the file is damaged. `state` may then hold a part of the changes: discard it.
    """
    from delta_weight_sync import codec

    shapes = {name: bits.shape for name, bits in state.items()}

    def add(part: codec.Decoded) -> None:
        for patch in part.patches(shapes):
            codec.apply(patch, state[patch.name])

    for _ in in_order(add, codec.Delta(path).decode(shapes, state.__getitem__)):
        pass  # `in_order` changes several groups of tensors at a time
    path.unlink()


def require_digest(state: dict[str, Bits], manifest: Manifest, expected: str = "") -> None:
    """Raise `ProtocolError` unless `state` (name -> bits) holds exactly the published bits of the version.

    If `state` holds only a part of the tensors, `expected` is the digest of that part.
    """
    from delta_weight_sync.digest import state_digest, to_hex

    digest = to_hex(state_digest(state))
    expected = expected or manifest.digest
    if digest != expected:
        raise errors.ProtocolError(
            f"version {manifest.version} has digest {expected}, but its files give {digest}; the run"
            " is damaged: resume from an earlier version"
        )
