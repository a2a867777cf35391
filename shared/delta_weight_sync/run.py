"""A run in a bucket, as its readers see it: `Run`, the reading half of the public API."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from delta_weight_sync.checkpoint import DTYPES, Bits, dtypes_in
from delta_weight_sync.reader import open_run
from delta_weight_sync.records import Manifest
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.verification import verified


@dataclass(frozen=True)
class TensorDiff:
    """The elements of a tensor whose bits differ between two versions.

    Attributes:
        name: The tensor's name in the checkpoint.
        dtype: Its dtype, by safetensors' name, such as "BF16".
        positions: Where the elements are in the flat tensor, ascending; int64.
        before: Their bits in the first version, as unsigned integers of the dtype's size.
        after: Their bits in the second version. `torch.from_numpy(diff.after).view(torch.bfloat16)` gives the
            values of a "BF16" tensor.
    """

    name: str
    dtype: str
    positions: NDArray[np.int64]
    before: NDArray[np.unsignedinteger]
    after: NDArray[np.unsignedinteger]


class Run:
    """Reads a run. Everything that is read is checked: records, files, and the digest of the weights.

        run = Run("hf://buckets/me/wordle#first")
        for manifest in run.versions():
            print(manifest.version, manifest.changed, manifest.digest)
        run.checkout("policy", version=41)

    Args:
        url: URL of the bucket, with `#<run>` if the bucket holds several runs.
        name: Name of the run, if the URL does not name it.
        public_key: A trusted key (`ed25519_public_` and 64 hex digits), several keys separated by commas, or
            a file that `delta-weight-sync keygen` wrote. Versions that no trusted key signed are refused. The
            default is DELTA_WEIGHT_SYNC_PUBLIC_KEY, or else the public half of DELTA_WEIGHT_SYNC_SIGNING_KEY.
            Without any key, signatures are not checked.

    Attributes:
        url: URL of the run, with its name.
        name: Name of the run.

    Raises:
        ProtocolError: No run is named and the bucket does not hold exactly one.
        BucketError: The bucket cannot be read.
        KeyFormatError: `public_key` is not a key.
        ConfigError: The URL and `name` name different runs.
    """

    def __init__(self, url: str, name: str | None = None, *, public_key: str | Path | None = None) -> None:
        self._reader = open_run(url, name, public_key=public_key)
        self.name = self._reader.keys.run
        self.url = f"{self._reader.bucket.url}#{self.name}"

    def __repr__(self) -> str:
        return f"<Run {self.url}>"

    def manifest(self, version: int | None = None) -> Manifest:
        """The manifest of a version, by default the newest.

        Raises:
            NoVersionError: The run has not published this version, or none at all.
            ProtocolError: The version was deleted, or a record is damaged or not signed by a trusted key.
            BucketError: The bucket cannot be read.
        """
        return self._reader.manifest(version)

    def versions(self) -> Iterator[Manifest]:
        """The manifests from the newest version back to version 0, or to the oldest that was not deleted.
        Each one is read when it is needed; raises as `manifest` does."""
        return self._reader.versions()

    def checkout(self, folder: str | Path, version: int | None = None) -> Manifest:
        """Write a version to `folder` as an ordinary Hugging Face checkpoint, by default the newest.

        Files of the same names are replaced. If a download fails, the next call continues it.

        Returns:
            The manifest of the version.

        Raises:
            ProtocolError, CodecError: A file is damaged, or the digest is not the published one.
            NoVersionError, BucketError: As for `manifest`.
        """
        manifest = self._reader.manifest(version)
        self._reader.checkout(manifest, Path(folder))
        return manifest

    def verify(self) -> Iterator[Manifest]:
        """Rebuild every version, oldest first, and yield the manifest of each that has the published digest.

        Anchors and jumps are checked, too. The disk holds at most two checkpoints at the same time.

        Raises:
            ProtocolError, CodecError, ObjectMissingError: The run is damaged; the message names what.
            NoVersionError, BucketError: As for `manifest`.
        """
        return verified(self._reader)

    def diff(self, before: int, after: int) -> Iterator[TensorDiff]:
        """The tensors that differ between two versions. Takes the disk space of two checkpoints.

        Raises as `checkout` does.
        """
        with Scratch() as folder:
            old = self._reader.checkout(self._reader.manifest(before), folder / "before")
            new = self._reader.checkout(self._reader.manifest(after), folder / "after")
            dtypes = dtypes_in(folder / "after")
            for name in sorted(new):
                old_elements = _elements(old[name], dtypes[name])
                new_elements = _elements(new[name], dtypes[name])
                positions = np.flatnonzero(old_elements != new_elements)
                if positions.size:
                    changed = old_elements[positions], new_elements[positions]
                    yield TensorDiff(name, dtypes[name], positions, *changed)


def _elements(words: Bits, dtype: str) -> NDArray[np.unsignedinteger]:
    """The words of a tensor as one unsigned integer for each element."""
    size = DTYPES[dtype][1]
    flat = np.ascontiguousarray(words).reshape(-1)
    return flat.astype(np.uint8) if size == 1 else flat.view(f"u{size}")
