"""Who can write to the bucket and has not the key: what it puts there is refused by name, serving goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delta_weight_sync.history import RunReader
from delta_weight_sync.keys import Keys, Writer
from delta_weight_sync.protocol import FileRef, Head, Manifest, Sealed, reference
from delta_weight_sync.publish.run_writer import RunWriter
from delta_weight_sync.signing import (
    PUBLIC_KEY,
    SIGNING_KEY,
    PublicKeys,
    SignatureError,
    SigningKey,
    fingerprint,
    new_pair,
)
from delta_weight_sync.store import Bucket, open_bucket
from delta_weight_sync.vllm.follower import Follower
from delta_weight_sync.vllm.progress import CountingReader
from delta_weight_sync.watch import watch
from tests.dashboard.real_run import RealRun
from tests.dashboard.test_long_run import Counted
from tests.inference.test_orders import Mortal, reaches, soon

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
        return self.reader.at(version)

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
        delta = {**newest.deltas[-1].model_dump(), "version": NEWEST + 1}
        fields |= {"deltas": (*newest.deltas, delta), "writer_term": writer.term, "writer": writer.id}
        manifest = sign(Manifest(**fields))
        ref = self.put(self.keys.manifest(NEWEST + 1, writer), manifest)
        names = {"writer_term": writer.term, "writer": writer.id, "version": NEWEST + 1, "manifest": ref}
        head = Head.model_validate_json(self.bucket.get(self.head))
        return sign(renewed(head, **names))


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket(f"file://{tmp_path}/bucket", create=True)


@pytest.fixture
def thief(bucket: Bucket) -> Thief:
    return Thief(bucket)


@pytest.fixture
def run(bucket: Bucket, thief: Thief, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealRun]:
    """At version 3, signed; this process has the trainer's keys."""
    for name, word in PAIR.items():
        monkeypatch.setenv(name, word)
    run = RealRun(bucket, run="signed", layers=1)
    for _ in range(NEWEST):
        thief.remember()
        run.step()
    thief.remember()
    yield run
    run.close()


@pytest.fixture
def follower(
    bucket: Bucket, run: RealRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Follower]:
    """It serves version 3."""
    monkeypatch.setattr("delta_weight_sync.vllm.follower._BACKOFF_S", 0.05)
    follower = following(bucket, tmp_path / "r")
    reaches(follower, NEWEST)
    yield follower
    follower.stop()


def following(bucket: Bucket, folder: Path) -> Follower:
    reader = CountingReader(bucket, "signed", PublicKeys(PAIR[PUBLIC_KEY]))
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
    assert follower.serving == run.reader.at(version)


def test_the_status_says_whose_versions_are_served(follower: Follower, run: RealRun) -> None:
    goes_on(follower, run)
    status = follower.report(0).status
    assert (status.signed_by, status.error) == (OURS, None)


@pytest.mark.parametrize("sign", SIGNERS.values(), ids=SIGNERS)
def test_a_forged_head_in_the_trainers_place(follower: Follower, run: RealRun, thief: Thief, sign: Signs):
    head = Head.model_validate_json(thief.bucket.get(thief.head))
    forged = thief.version(sign, Writer(head.writer_term, head.writer))
    thief.put(thief.head, forged)
    refuses(follower, thief.head, OURS)
    goes_on(follower, run)


@pytest.mark.parametrize("sign", SIGNERS.values(), ids=SIGNERS)
def test_a_forged_writer_that_comes_after_the_trainer(
    follower: Follower, run: RealRun, thief: Thief, sign: Signs
) -> None:
    """Its HEAD is the last one: neither replica nor trainer gives way to it."""
    writer = Writer(99, "e" * 32)
    thief.put(thief.keys.head(writer), thief.version(sign, writer))
    refuses(follower, thief.keys.head(writer), OURS)
    goes_on(follower, run)
    refuses_still = follower.report(0).status.error or ""
    assert thief.keys.head(writer) in refuses_still
    thief.bucket.delete([thief.keys.head(writer)])
    soon(lambda: follower.report(0).status.error is None, "no error once it is gone")


@pytest.mark.parametrize("version", range(NEWEST))
def test_a_replayed_head(follower: Follower, run: RealRun, thief: Thief, version: int) -> None:
    thief.bucket.put(thief.head, thief.then(version, thief.head))
    refuses(follower, thief.head, f"went back from version {NEWEST} to {version}")
    goes_on(follower, run)


def test_a_head_replayed_while_nobody_looks_is_an_old_one_all_the_same(
    follower: Follower, run: RealRun, thief: Thief
) -> None:
    follower.orders.pause()
    thief.bucket.put(thief.head, thief.then(1, thief.head))
    follower.orders.resume()
    refuses(follower, thief.head, f"went back from version {NEWEST} to 1")
    goes_on(follower, run)


@pytest.mark.parametrize("size", [0, 80, -1])
def test_a_truncated_head(follower: Follower, run: RealRun, thief: Thief, size: int) -> None:
    thief.bucket.put(thief.head, thief.bucket.get(thief.head)[:size])
    refuses(follower, thief.head)
    goes_on(follower, run)


def test_another_run_of_the_same_key_in_the_place_of_this_one(
    follower: Follower, run: RealRun, thief: Thief, tmp_path: Path
) -> None:
    """HEAD, manifests and files of it, all of them with good signatures."""
    other = RealRun(thief.bucket, run="other", layers=1)
    for _ in range(NEWEST + 2):
        other.step()
    other.close()
    folder = tmp_path / "bucket" / "runs"
    shutil.copytree(folder / "other", folder / "signed", dirs_exist_ok=True)
    (theirs,) = thief.bucket.list("runs/other/heads/")
    thief.bucket.put(thief.head, thief.bucket.get(theirs.key))
    refuses(follower, thief.head, "belongs to run 'other'")
    goes_on(follower, run)


FORGED_MANIFESTS: dict[str, Callable[[Thief, Manifest], bytes]] = {
    "unsigned": lambda thief, manifest: unsigned(manifest).to_bytes(),
    "other weights": lambda thief, manifest: renewed(manifest, digest="0" * 16).to_bytes(),
    "other key": lambda thief, manifest: THEIRS.sign(manifest).to_bytes(),
    "of the version before": lambda thief, manifest: thief.manifest(NEWEST).to_bytes(),
    "truncated": lambda thief, manifest: manifest.to_bytes()[:100],
    "empty": lambda thief, manifest: b"",
}


@pytest.mark.parametrize("forge", FORGED_MANIFESTS.values(), ids=FORGED_MANIFESTS)
def test_another_manifest_in_the_place_of_one_that_nobody_has_read(
    follower: Follower, run: RealRun, thief: Thief, forge: Callable[[Thief, Manifest], bytes]
) -> None:
    follower.orders.pause()
    manifest = run.step()
    thief.bucket.put(thief.key_of(manifest), forge(thief, manifest))
    follower.orders.resume()
    refuses(follower, thief.key_of(manifest))
    goes_on(follower, run, NEWEST + 2)


@pytest.mark.parametrize("sign", SIGNERS.values(), ids=SIGNERS)
def test_forged_manifest_and_head_that_name_each_other(
    follower: Follower, run: RealRun, thief: Thief, sign: Signs
) -> None:
    """The hashes fit: only the signatures do not."""
    follower.orders.pause()
    manifest = run.step()
    forged = sign(renewed(manifest, digest="0" * 16))
    ref = thief.put(thief.key_of(manifest), forged)
    head = Head.model_validate_json(thief.bucket.get(thief.head))
    thief.put(thief.head, sign(renewed(head, manifest=ref)))
    follower.orders.resume()
    refuses(follower, thief.head, OURS)
    goes_on(follower, run, NEWEST + 2)


@pytest.mark.parametrize("version", [NEWEST, NEWEST + 1])
@pytest.mark.parametrize("size", [None, 100, 0])
def test_a_delta_that_is_swapped_or_truncated(
    follower: Follower, run: RealRun, thief: Thief, version: int, size: int | None
) -> None:
    """By another one of the same run: valid, and what it changes are other weights."""
    follower.orders.pause()
    run.step()
    delta = run.step().deltas[-1]
    published = thief.bucket.get(delta.key)
    swapped = thief.bucket.get(run.reader.at(version).deltas[-1].key)
    thief.bucket.put(delta.key, swapped[:size])
    follower.orders.resume()
    refuses(follower, delta.key, "is not the published object")
    thief.bucket.put(delta.key, published)
    goes_on(follower, run, NEWEST + 3)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_an_anchor_that_is_swapped_is_not_joined(
    bucket: Bucket, run: RealRun, thief: Thief, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta_weight_sync.vllm.follower._BACKOFF_S", 0.05)
    (ref,) = (file for file in run.reader.at().anchor.files if file.name == name)
    published = bucket.get(ref.key)
    bucket.put(ref.key, published[:-1] + bytes([published[-1] ^ 1]))
    follower = following(bucket, tmp_path / "late")
    try:
        soon(lambda: ref.key in (follower.report(0).status.error or ""), f"{follower.report(0).status}")
        assert follower.serving is None
        bucket.put(ref.key, published)
        reaches(follower, NEWEST)
    finally:
        follower.stop()


def test_a_forged_version_cannot_be_pinned(follower: Follower, run: RealRun, thief: Thief) -> None:
    writer = Writer(99, "e" * 32)
    real = thief.manifest(2)
    names = {"writer_term": writer.term, "writer": writer.id, "digest": "0" * 16}
    thief.put(thief.keys.manifest(2, writer), THEIRS.sign(renewed(real, **names)))
    follower.orders.pin(2)
    reaches(follower, 2)
    assert follower.serving == real


def test_the_next_trainer_goes_on_from_what_was_signed(
    bucket: Bucket, run: RealRun, thief: Thief, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(99, "e" * 32)
    thief.put(thief.keys.head(writer), thief.version(THEIRS.sign, writer))
    next_one = RunWriter(bucket, "signed", model="m", assets=None)
    assert next_one.newest == run.reader.at()
    assert next_one.newest.version == NEWEST
    assert next_one.writer > writer
    assert [info.key for info in bucket.list(thief.keys.heads)] == [thief.keys.head(next_one.writer)]


def test_a_trainer_does_not_go_on_from_a_run_that_its_key_did_not_sign(
    bucket: Bucket, run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, word in new_pair().items():
        monkeypatch.setenv(name, word)
    with pytest.raises(SignatureError, match=r"was not signed by .*or begin another run"):
        RunWriter(bucket, "signed", model="m", assets=None)


def test_a_trainer_with_a_new_key_goes_on_where_both_are_believed(
    bucket: Bucket, run: RealRun, follower: Follower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner changes keys; a reader that still believes the old one alone is left behind, and says so."""
    new = new_pair()
    both = f"{new[PUBLIC_KEY]},{PAIR[PUBLIC_KEY]}"
    monkeypatch.setenv(SIGNING_KEY, new[SIGNING_KEY])
    monkeypatch.setenv(PUBLIC_KEY, both)
    assets = tmp_path / "assets"
    assets.mkdir()
    writer = RunWriter(bucket, "signed", model="m", assets=assets)
    delta = bucket.get(run.reader.at().deltas[-1].key)
    made = writer.commit(
        writer.put_delta(NEWEST + 1, delta, 1), None, digest="0" * 16, sync=9, total=1, created_at=0.0
    )
    assert RunReader(bucket, "signed", PublicKeys(both)).signer(made) == fingerprint(new[PUBLIC_KEY])
    assert len(list(RunReader(bucket, "signed", PublicKeys(both)).history())) == NEWEST + 2
    refuses(follower, thief_name(writer), OURS)


def thief_name(writer: RunWriter) -> str:
    return writer.keys.head(writer.writer)


def test_a_reader_with_the_wrong_key_says_so_and_does_not_read_the_whole_run(bucket: Bucket) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, word in PAIR.items():
            patch.setenv(name, word)
        run = RealRun(bucket, run="signed", layers=1)
        for _ in range(40):
            run.step()
        run.close()
    counted = Counted(bucket)
    with pytest.raises(SignatureError, match=r"heads/.* was not signed by"):
        RunReader(counted, "signed", PublicKeys(new_pair()[PUBLIC_KEY])).at()
    assert counted.asked["get"] < 40
    assert RunReader(bucket, "signed", PublicKeys("")).at().version == 40, "without a key nothing is checked"


def test_in_every_store(bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word in PAIR.items():
        monkeypatch.setenv(name, word)
    bucket = open_bucket(bucket_url)
    thief, run = Thief(bucket), RealRun(bucket, run="signed", layers=1)
    for _ in range(NEWEST):
        thief.remember()
        run.step()
    follower = following(bucket, tmp_path / "r")
    try:
        reaches(follower, NEWEST)
        writer, head = Writer(99, "e" * 32), thief.head
        thief.put(thief.keys.head(writer), thief.version(THEIRS.sign, writer))
        refuses(follower, thief.keys.head(writer), OURS)
        thief.bucket.put(head, thief.then(1, head))
        refuses(follower, head, f"went back from version {NEWEST} to 1")
        goes_on(follower, run)
    finally:
        follower.stop()
        run.close()


def test_a_folder_that_is_kept_says_what_it_passes_over(bucket: Bucket, run: RealRun, thief: Thief) -> None:
    writer, taken = Writer(99, "e" * 32), list[int]()
    thief.put(thief.keys.head(writer), thief.version(THEIRS.sign, writer))

    def complain(error: Exception) -> None:
        raise InterruptedError(str(error))  # ends the watch

    with pytest.raises(InterruptedError, match=f"{thief.keys.head(writer)} was not signed by {OURS}"):
        watch(
            RunReader(bucket, "signed", PublicKeys(PAIR[PUBLIC_KEY])),
            lambda manifest: taken.append(manifest.version),
            complain,
        )
    assert taken == [NEWEST]


def test_who_has_just_started_cannot_know_that_a_version_is_old(
    bucket: Bucket, run: RealRun, thief: Thief, tmp_path: Path
) -> None:
    """As SECURITY.md says: a signature has no date. It is a version of this run, and the status names it."""
    thief.bucket.put(thief.head, thief.then(1, thief.head))
    follower = following(bucket, tmp_path / "new")
    try:
        reaches(follower, 1)
        assert follower.report(0).status.signed_by == OURS
        goes_on(follower, run)
    finally:
        follower.stop()
