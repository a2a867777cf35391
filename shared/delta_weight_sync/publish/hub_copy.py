"""Version 0 without an upload: the Hub copies the files of the base into the bucket.

Models and buckets on the Hub share one storage, which knows each file by a hash. If version 0 equals the
base, bit for bit, one request with these hashes makes the base's files the anchor. Then no weight leaves this
machine. Otherwise, the anchor is uploaded, for example if the base has other dtypes, or if the trainer has
changed a weight.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np

from delta_weight_sync.checkpoint import INDEX, Bits, Spec, Specs, map_bits, specs_in
from delta_weight_sync.errors import BucketError
from delta_weight_sync.publish.base import Base
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.records import MAX_ASSETS, FileRef
from delta_weight_sync.store import HubFile
from delta_weight_sync.util import SafeLogger

# Readers know the files of an older anchor by such names, and delete them.
_MOST_FILES: Final = MAX_ASSETS // 4  # leaves room for the small files of an anchor
_NAME: Final = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_log = SafeLogger()


class _UnfitError(Exception):
    """The base's files cannot be those of version 0. The message says why."""


class HubCopy:
    """Copies the base's files into the bucket, on rank 0. If that is not possible, it logs why."""

    def __init__(self, base: Base, writer: RunWriter) -> None:
        self._base = base
        self._writer = writer
        self._files: dict[str, HubFile] = {}  # the base's files of weights, by name

    def may_fit(self, version: Specs) -> bool:
        """Whether the Hub has the base's files, with the tensors of `version`, perhaps in other values."""
        with self._or_upload():
            bucket = self._writer.bucket
            base = self._base
            if not bucket.copies_from_hub:
                raise _UnfitError(f"{bucket.url} is not on the Hub")
            if not base.is_on_hub:
                raise _UnfitError(f"{base.name} is a folder of this machine, not a model on the Hub")
            paths = base.checkpoint.paths if base.checkpoint else []
            self._require_same_tensors(paths, version)
            revision = base.folder.name  # the cache names a snapshot's folder after its commit
            self._files = bucket.find_on_hub(base.name, revision, [path.name for path in paths])
            return True
        return False

    def copy(
        self, own: Collection[str], bits: Callable[[str], Bits], others: Mapping[str, bytes]
    ) -> list[FileRef]:
        """Let the Hub copy the files if they have the values of version 0. `may_fit` must have been true.

        Args:
            own: Names of the tensors that rank 0 owns.
            bits: Returns the words of a tensor in `own`.
            others: The `fingerprint` of the tensors of other ranks, by name.

        Returns:
            All files of the anchor; empty if the anchor must be uploaded.
        """
        writer = self._writer
        folder = self._base.folder
        copies = {writer.keys.anchor(0, writer.writer, name): file for name, file in self._files.items()}
        refs = [FileRef(key=key, size=file.size, sha256=file.sha256) for key, file in copies.items()]
        done = False
        with self._or_upload():
            for ref in refs:
                for name, words in map_bits(folder / ref.name).items():
                    if name in own:
                        same = np.array_equal(words, bits(name))
                    else:
                        same = fingerprint(words) == others[name]
                    if not same:
                        raise _UnfitError(f"{name} has other values than in {self._base.name}")
                if not ref.is_in(folder / ref.name):
                    raise _UnfitError(f"{folder / ref.name} is not the file that {self._base.name} has")
            try:
                writer.bucket.copy_from_hub(self._base.name, copies)
            except BucketError:
                with suppress(BucketError):
                    writer.bucket.delete([*copies])  # the Hub may have copied some of the files
                raise
            done = True
        index = folder / INDEX
        return [*refs, *writer.put_weights(0, [index] if index.is_file() else [])] if done else []

    def _require_same_tensors(self, paths: list[Path], version: Specs) -> None:
        """Raise unless the files have the version's tensors, in a form that all readers of anchors take."""
        name = self._base.name
        if len(paths) > _MOST_FILES:
            raise _UnfitError(
                f"{name} has its weights in {len(paths)} files; at most {_MOST_FILES} are copied"
            )
        found = dict[str, Spec]()
        for path in paths:
            if not _NAME.fullmatch(path.name):
                raise _UnfitError(f"{name} has {path.name}, a name that no anchor's file has")
            specs = specs_in(path)
            if twice := found.keys() & specs.keys():
                raise _UnfitError(f"{name} has {min(twice)} in two files")
            found |= specs
        if differing := found.keys() ^ version.keys():
            raise _UnfitError(f"{min(differing)} is only in one of version 0 and {name}")
        for tensor, spec in version.items():
            if spec != found[tensor]:
                raise _UnfitError(
                    f"{tensor} is {spec.dtype} {[*spec.shape]} in version 0, but {found[tensor].dtype}"
                    f" {[*found[tensor].shape]} in {name}"
                )
        for path in paths:
            if not all(words.flags.aligned for words in map_bits(path).values()):
                raise _UnfitError(f"the tensors in {path.name} of {name} are not aligned")

    @contextmanager
    def _or_upload(self) -> Iterator[None]:
        """Log why the version is uploaded instead, if that is so, and go on."""
        try:
            yield
        except _UnfitError as why:
            _log.info("version 0 is uploaded, not copied from the base: %s", why)
        except BucketError as error:
            _log.warning("version 0 is uploaded, not copied from the base: %s", error)


def fingerprint(words: Bits) -> bytes:
    """The sha256 of a tensor's words. Words of one byte may come as uint8 or as uint16."""
    return hashlib.sha256(np.ascontiguousarray(words.reshape(-1), np.uint16).data).digest()
