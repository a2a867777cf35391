"""Tags: names for versions of a run, such as `best`.

A tag is one small object, so there is no list to read and write back, and two programs that set different
tags lose none. The last one that sets the same tag wins. In a signed run, a tag is signed as a version is.
A stranger with write access can remove a tag, or put back an earlier one, but cannot make a new one.
"""

import time
from pathlib import Path

from delta_weight_sync.errors import ConfigError, ProtocolError
from delta_weight_sync.reader import Problems, RunReader
from delta_weight_sync.records import MAX_TAGS, Manifest, Tag, Writer, reference, tag_name
from delta_weight_sync.signing import SIGNING_KEY, writer_keys


def tags_of(reader: RunReader, newest: Manifest, problems: Problems | None = None) -> list[Tag]:
    """The valid tags of a run, by name.

    Args:
        reader: Reads the run.
        newest: The run's newest manifest.
        problems: Receives the error of each object that is not a valid tag.

    Raises:
        BucketError: The bucket cannot be read.
    """
    found: list[Tag] = []
    names = (tag_name(info.key) for info in reader.bucket.list(reader.keys.tags))
    for name in sorted(filter(None, names))[:MAX_TAGS]:
        try:
            found.append(reader.tag(name, newest))
        except ProtocolError as error:
            if problems is not None:
                problems[reader.keys.tag(name)] = error
    return found


def set_tag(
    reader: RunReader, version: int | str | None, name: str, signing_key: str | Path | None = None
) -> Tag:
    """Give a version a tag. If another version has this tag, it loses the tag.

    Args:
        reader: Reads the run.
        version: A number, another tag, or None for the newest version.
        name: The tag: letters, digits, ".", "_" and "-", the first a letter.
        signing_key: The key that signs the tag, as for `Publisher`.

    Raises:
        ConfigError: `name` cannot be a tag, the run is signed and there is no key, or it has too many tags.
        NoVersionError: The run has not published this version.
        ProtocolError: The version was deleted.
        BucketError: The bucket cannot be read or written.
    """
    key = reader.keys.tag(name)
    signing, _ = writer_keys(signing_key)
    manifest = reader.manifest(version)
    if manifest.signature and not signing:
        raise ConfigError(
            f"the versions of run {reader.keys.run!r} are signed, and readers would refuse an unsigned tag:"
            f" set {SIGNING_KEY} to the trainer's key"
        )
    if len({info.key for info in reader.bucket.list(reader.keys.tags)} | {key}) > MAX_TAGS:
        raise ConfigError(f"run {reader.keys.run!r} has {MAX_TAGS} tags, and no room for more: remove one")
    place = reader.keys.manifest(manifest.version, Writer(manifest.writer_term, manifest.writer))
    tag = Tag(
        run=reader.keys.run,
        name=name,
        born=manifest.born,
        version=manifest.version,
        digest=manifest.digest,
        manifest=reference(place, manifest),
        created_at=time.time(),
    )
    tag = signing.sign(tag) if signing else tag
    reader.bucket.put(key, tag.to_bytes())
    # Afterwards, because a trainer may have deleted the version while it had no tag.
    needed = {file.key for file in manifest.recipe().files} | {place}
    if missing := needed - reader.bucket.stat_all([*needed]).keys():
        reader.bucket.delete([key])
        raise ProtocolError(
            f"version {manifest.version} can no longer be built, because {min(missing)} was deleted:"
            " tag a newer version"
        )
    return tag


def remove_tag(reader: RunReader, name: str) -> None:
    """Remove a tag. Its version stays until old versions are deleted.

    Raises:
        ConfigError: `name` cannot be a tag, or the run has no such tag.
        BucketError: The bucket cannot be read or written.
    """
    key = reader.keys.tag(name)
    if reader.bucket.stat(key) is None:
        raise ConfigError(f"run {reader.keys.run!r} has no tag {name!r}: list the tags first")
    reader.bucket.delete([key])
