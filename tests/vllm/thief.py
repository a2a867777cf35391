"""Somebody who may write to the bucket and has not the key, and the run that is to be protected from that."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import FileRef, Head, Keys, Manifest, Sealed, Writer, reference
from delta_weight_sync.signing import (
    PUBLIC_KEY,
    SIGNING_KEY,
    PublicKeys,
    SigningKey,
    fingerprint,
    new_pair,
)
from delta_weight_sync.store import Bucket
from delta_weight_sync.vllm.follower import Follower
from tests.support.fake_vllm import Mortal, reaches, soon
from tests.support.real_run import RealRun

PAIR, THEIRS = new_pair(), SigningKey(new_pair()[SIGNING_KEY])
OURS = fingerprint(PAIR[PUBLIC_KEY])
NEWEST = 3
Signs = Callable[[Sealed], Sealed]


def unsigned(record: Sealed) -> Sealed:
    return record.model_copy(update={"signature": ""})


def renewed(record: Sealed, **changes: object) -> Sealed:
    """The record with other content, a fitting seal, and the signature that it had."""
    return type(record)(**{**record.model_dump(exclude={"seal"}), **changes})


SIGNERS: dict[str, Signs] = {"unsigned": unsigned, "old signature": renewed, "other key": THEIRS.sign}


class Thief:
    """Has a token that may write to the bucket, a copy of whatever was in it, and a key of its own."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.keys = bucket, Keys("signed")
        self.reader = RunReader(bucket, "signed", PublicKeys(""))
        self._past: list[dict[str, bytes]] = []

    def remember(self) -> None:
        self._past.append({info.key: self.bucket.get(info.key) for info in self.bucket.list("runs/")})

    def then(self, version: int, key: str) -> bytes:
        """An object as it was at a version."""
        return self._past[version][key]

    @property
    def head(self) -> str:
        return self.bucket.list(self.keys.heads)[-1].key

    def manifest(self, version: int) -> Manifest:
        return self.reader.manifest(version)

    def key_of(self, manifest: Manifest) -> str:
        return self.keys.manifest(manifest.version, Writer(manifest.writer_term, manifest.writer))

    def put(self, key: str, record: Sealed) -> FileRef:
        self.bucket.put(key, record.to_bytes())
        return reference(key, record)

    def version(self, sign: Signs, writer: Writer) -> Head:
        """Puts a next version: the manifest of the newest one with other weights, and HEAD's words for it."""
        newest = self.manifest(NEWEST)
        fields = newest.model_dump(exclude={"seal", "version", "parent"})
        fields |= {"version": NEWEST + 1, "parent": reference(self.key_of(newest), newest)}
        delta = {**newest.deltas[-1].model_dump(), "base": NEWEST, "version": NEWEST + 1}
        fields |= {"deltas": (*newest.deltas, delta), "writer_term": writer.term, "writer": writer.id}
        manifest = sign(Manifest(**fields))
        ref = self.put(self.keys.manifest(NEWEST + 1, writer), manifest)
        names = {"writer_term": writer.term, "writer": writer.id, "version": NEWEST + 1, "manifest": ref}
        head = Head.model_validate_json(self.bucket.get(self.head))
        return sign(renewed(head, **names))


@contextmanager
def signed_run(bucket: Bucket, thief: Thief, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealRun]:
    """At version 3; this process has the trainer's keys from now on."""
    for name, word in PAIR.items():
        monkeypatch.setenv(name, word)
    run = RealRun(bucket, run="signed", layers=1)
    for _ in range(NEWEST):
        thief.remember()
        run.step()
    thief.remember()
    yield run
    run.close()


def following(bucket: Bucket, folder: Path) -> Follower:
    reader = RunReader(bucket, "signed", PublicKeys(PAIR[PUBLIC_KEY]))
    follower = Follower(reader, Mortal(), name="r", folder=folder, poll_s=0.01)
    follower.start()
    return follower


def refuses(follower: Follower, *words: str) -> None:
    """All of the words are in the status's error, and what is served is served on."""
    soon(
        lambda: all(word in (follower.report(0).status.error or "") for word in words),
        f"{words}: {follower.report(0).status}",
    )
    status = follower.report(0).status
    assert (status.state, status.version, status.signed_by) == ("serving", NEWEST, OURS)


def goes_on(follower: Follower, run: RealRun, version: int = NEWEST + 1) -> None:
    """The trainer publishes, and the replica has exactly that."""
    while run.step().version < version:
        pass
    reaches(follower, version)
    assert follower.serving == run.reader.manifest(version)
