"""A run in a bucket, as its readers see it: `Run`, the reading half of the public API."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from delta_weight_sync.differences import TensorDiff, differences
from delta_weight_sync.errors import FolderError
from delta_weight_sync.push import push_version
from delta_weight_sync.reader import number_or_tag, open_run
from delta_weight_sync.records import Manifest, Tag
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.tags import remove_tag, set_tag, tags_of
from delta_weight_sync.util import make_folder
from delta_weight_sync.verification import verified
from delta_weight_sync.waiting import wait_for

_MADE: Final = ".delta_weight_sync"  # an empty file in each folder that `checkout` made


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

    def manifest(self, version: int | str | None = None) -> Manifest:
        """The manifest of a version (a number or a tag), by default the newest.

        Raises:
            NoVersionError: The run has not published this version, or none at all, or it has no such tag.
            ConfigError: The text cannot be a tag.
            ProtocolError: The version was deleted, or a record is damaged or not signed by a trusted key.
            BucketError: The bucket cannot be read.
        """
        return self._reader.manifest(version)

    def versions(self) -> Iterator[Manifest]:
        """The manifests from the newest version back to version 0, or to the oldest that was not deleted.
        Each one is read when it is needed; raises as `manifest` does."""
        return self._reader.versions()

    def checkout(self, folder: str | Path, version: int | str | None = None) -> Manifest:
        """Write a version to `folder` as an ordinary Hugging Face checkpoint.

        `version` is a number or a tag; by default, the newest version is written.

        `folder` must be empty, or hold an earlier checkout, which is replaced. If a download fails, the next
        call continues it.

        Returns:
            The manifest of the version.

        Raises:
            ProtocolError, CodecError: A file is damaged, or the digest is not the published one.
            FolderError: `folder` is a file, may not be made, or holds files but no earlier checkout.
            NoVersionError, BucketError: As for `manifest`.
        """
        manifest = self._reader.manifest(version)
        folder = Path(folder)
        make_folder(folder)
        if not (folder / _MADE).exists() and any(folder.iterdir()):
            raise FolderError(f"{folder} holds other files: name an empty folder, or a new one")
        (folder / _MADE).touch()
        self._reader.checkout(manifest, folder)
        return manifest

    def verify(self, version: int | str | None = None) -> Iterator[Manifest]:
        """Rebuild every version, oldest first, and yield the manifest of each that has the published digest.

        With `version`, a number or a tag, rebuild only this one. Without, anchors and jumps are checked,
        too, but not versions below the oldest one that was not deleted, which only tags keep. The disk
        holds at most two checkpoints at the same time.

        Raises:
            ProtocolError, CodecError, ObjectMissingError: The run is damaged; the message names what.
            NoVersionError, BucketError: As for `manifest`.
        """
        return verified(self._reader) if version is None else self._verified(version)

    def _verified(self, version: int | str) -> Iterator[Manifest]:
        with Scratch() as folder:
            yield self.checkout(folder, version)

    def tag(self, version: int | str | None, name: str, *, signing_key: str | Path | None = None) -> Tag:
        """Give a version a tag, such as "best", which is accepted wherever a version is.

        A version with a tag is kept when older versions are deleted. If another version has this tag, it
        loses the tag.

        Args:
            version: The number of the version, or another of its tags; None for the newest version.
            name: The tag: at most 64 letters, digits, ".", "_" and "-", the first a letter.
            signing_key: The key that signs the tag, as for `Publisher`; needed if the run is signed.

        Raises:
            ConfigError: `name` cannot be a tag, there are too many, or the run is signed and there is no key.
            ProtocolError: The version was deleted.
            NoVersionError, BucketError: As for `manifest`.
        """
        return set_tag(self._reader, version, name, signing_key)

    def untag(self, name: str) -> None:
        """Remove a tag. Its version may then be deleted with other old versions.

        Raises:
            ConfigError: The run has no such tag.
            BucketError: The bucket cannot be read or written.
        """
        remove_tag(self._reader, name)

    def tags(self) -> list[Tag]:
        """The tags of the run, by name. Tags that are damaged, or that no trusted key signed, are left out.

        Raises as `manifest` does.
        """
        return tags_of(self._reader, self._reader.manifest())

    def diff(self, before: int | str, after: int | str, other: "Run | None" = None) -> Iterator[TensorDiff]:
        """The tensors that differ between two versions. Takes the disk space of two checkpoints.

        Args:
            before: A version of this run, by number or tag.
            after: A version of `other`.
            other: A run with the same tensors; by default this run.

        Raises:
            CodecError: The runs have different tensors, or as for `checkout`.
            ProtocolError, NoVersionError, BucketError: As for `checkout`.
        """
        new = (other or self)._reader
        old = self._reader
        found = differences((old, old.manifest(before)), (new, new.manifest(after)))
        return (tensor for tensor in found if tensor.positions.size)

    def push(self, to: str, version: int | str | None = None, *, public: bool = False) -> str:
        """Write a version to the Hub as an ordinary model repository, with a model card.

        Args:
            to: The model repository, such as "me/model". It is created if missing.
            version: A number or a tag; by default the newest version.
            public: Make a new repository public; by default it is private.

        Returns:
            The URL of the commit.

        Raises:
            ConfigError: `to` is not the name of a repository.
            BucketError: The Hub refused the upload, or the bucket cannot be read.
            ProtocolError, CodecError, NoVersionError: As for `checkout`.
        """
        return push_version(self._reader, self.manifest(version), to, public=public)

    def wait(
        self, version: int | str | None, replicas: Iterable[str], *, timeout_s: float | None = None
    ) -> dict[str, int]:
        """Wait until each replica serves a version or a newer one, with the published digest.

        Args:
            version: The number of the version, which need not be published yet, or a tag; None for
                the newest version.
            replicas: The URL of each replica: a Space of this project, or a vLLM server with the plugin.
                A private Space gets the token in SPACE_HF_TOKEN if SPACES lists it.
            timeout_s: Seconds to wait at most; by default, for ever.

        Returns:
            The version that each replica serves, by URL.

        Raises:
            TimeoutError: The time is over; the message says what is missing at each replica.
            ConfigError: No replica is given, one of the URLs is not one, or SPACES or SPACE_HF_TOKEN is bad.
            ProtocolError, NoVersionError, BucketError: As for `manifest`.
        """
        version = number_or_tag(version)
        number = version if isinstance(version, int) else self.manifest(version).version
        return wait_for(self._reader, number, [*replicas], timeout_s)
