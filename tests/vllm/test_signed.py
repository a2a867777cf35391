"""Who can write to the bucket and has not the key: what it puts there is refused by name, serving goes on."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delta_weight_sync import Run, follow
from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import SignatureError
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import FileRef, Head, Keys, Manifest, Sealed, Writer, reference
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, PublicKeys, SigningKey, fingerprint, new_pair
from delta_weight_sync.store import Bucket
from delta_weight_sync.vllm.follower import Follower
from tests.cli.command import command
from tests.support.buckets import CountedBucket
from tests.support.fake_vllm import InMemoryVllm, soon, wait_until_serving
from tests.support.real_run import RealRun
from tests.support.written_run import file_ref

PAIR = new_pair()
THEIRS = SigningKey(new_pair()[SIGNING_KEY])
OURS = fingerprint(PAIR[PUBLIC_KEY])
NEWEST = 3
CLAIM = Writer(99, "e" * 32)  # the last writer of the run, if it is believed
Signs = Callable[[Sealed], Sealed]


def unsigned(record: Sealed) -> Sealed:
    return record.model_copy(update={"signature": ""})


def renewed(record: Sealed, **changes: object) -> Sealed:
    """The record with other content, a fitting seal, and the signature that it had."""
    return type(record)(**{**dict(record), "seal": "", **changes})


SIGNERS: dict[str, Signs] = {"unsigned": unsigned, "old signature": renewed, "other key": THEIRS.sign}


class Thief:
    """Has a token that may write to the bucket, a copy of whatever was in it, and a key of its own."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.keys = Keys("signed")
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
        fields = dict(newest) | {"seal": ""}
        fields |= {"version": NEWEST + 1, "parent": reference(self.key_of(newest), newest)}
        versions = {"base": NEWEST, "version": NEWEST + 1, "key": self.keys.delta(NEWEST + 1, writer)}
        delta = newest.deltas[-1].model_copy(update=versions)
        fields |= {"deltas": (*newest.deltas, delta), "writer_term": writer.term, "writer": writer.id}
        manifest = sign(Manifest(**fields))
        ref = self.put(self.keys.manifest(NEWEST + 1, writer), manifest)
        names = {"writer_term": writer.term, "writer": writer.id, "version": NEWEST + 1, "manifest": ref}
        head = Head.model_validate_json(self.bucket.get(self.head))
        return sign(renewed(head, **names))


def following(bucket: Bucket, folder: Path) -> Follower:
    reader = RunReader(bucket, "signed", PublicKeys(PAIR[PUBLIC_KEY]))
    follower = Follower(reader, InMemoryVllm(), name="r", folder=folder, poll_s=0.01)
    follower.start()
    return follower


def refuses(follower: Follower, *words: str) -> None:
    """All of the words are in the status's error, and what is served is served on."""
    soon(
        lambda: all(word in (follower.report(0).status.error or "") for word in words),
        lambda: f"{words}: {follower.report(0).status}",
    )
    status = follower.report(0).status
    assert (status.state, status.version, status.signed_by) == ("serving", NEWEST, OURS)


def goes_on(follower: Follower, run: RealRun, version: int = NEWEST + 1) -> None:
    """The trainer publishes, and the replica has exactly that."""
    while run.step().version < version:
        pass
    wait_until_serving(follower, version)
    assert follower.serving == run.reader.manifest(version)


@pytest.fixture
def thief(bucket: Bucket) -> Thief:
    return Thief(bucket)


@pytest.fixture
def run(bucket: Bucket, thief: Thief, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealRun]:
    """At version 3; this process has the trainer's keys from now on, and followers retry after moments."""
    monkeypatch.setattr("delta_weight_sync.watch.LONGEST_S", 0.05)
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
def follower(bucket: Bucket, run: RealRun, tmp_path: Path) -> Iterator[Follower]:
    """It serves version 3."""
    follower = following(bucket, tmp_path / "r")
    wait_until_serving(follower, NEWEST)
    yield follower
    follower.stop()


@pytest.mark.parametrize("sign", SIGNERS.values(), ids=SIGNERS)
def test_a_forged_head_in_the_trainers_place(follower: Follower, run: RealRun, thief: Thief, sign: Signs):
    head = Head.model_validate_json(thief.bucket.get(thief.head))
    forged = thief.version(sign, Writer(head.writer_term, head.writer))
    thief.put(thief.head, forged)
    refuses(follower, thief.head, OURS)
    goes_on(follower, run)


@pytest.mark.parametrize(("version", "size"), [(3, 0), (3, 80), (3, -1), (0, None), (1, None), (2, None)])
def test_a_replayed_or_truncated_head(follower, run, thief, version, size) -> None:
    thief.bucket.put(thief.head, thief.then(version, thief.head)[:size])
    refuses(follower, thief.head, "" if version == NEWEST else f"went back from version 3 to {version}")
    goes_on(follower, run)


def test_another_run_of_the_same_key_in_the_place_of_this_one(follower, run, thief, tmp_path) -> None:
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
def test_another_manifest_in_the_place_of_one_that_nobody_has_read(follower, run, thief, forge) -> None:
    follower.commands.pause()
    manifest = run.step()
    thief.bucket.put(thief.key_of(manifest), forge(thief, manifest))
    follower.commands.resume()
    refuses(follower, thief.key_of(manifest))
    goes_on(follower, run, NEWEST + 2)


@pytest.mark.parametrize("version", [NEWEST, NEWEST + 1])
@pytest.mark.parametrize("size", [None, 100, 0])
def test_a_delta_that_is_swapped_or_truncated(follower, run, thief, version, size) -> None:
    """By another one of the same run: valid, and what it changes are other weights."""
    follower.commands.pause()
    run.step()
    delta = run.step().deltas[-1]
    published = thief.bucket.get(delta.key)
    swapped = thief.bucket.get(run.reader.manifest(version).deltas[-1].key)
    thief.bucket.put(delta.key, swapped[:size])
    follower.commands.resume()
    larger = len(swapped[:size]) > delta.size
    refuses(follower, delta.key, "it was not read" if larger else "is not the published object")
    thief.bucket.put(delta.key, published)
    goes_on(follower, run, NEWEST + 3)


def test_a_forged_version_cannot_be_pinned(follower: Follower, run: RealRun, thief: Thief) -> None:
    real = thief.manifest(2)
    names = {"writer_term": CLAIM.term, "writer": CLAIM.id, "digest": "0" * 16}
    thief.put(thief.keys.manifest(2, CLAIM), THEIRS.sign(renewed(real, **names)))
    follower.commands.pin(2)
    wait_until_serving(follower, 2)
    assert follower.serving == real


def claim(thief: Thief, sign: Signs) -> None:
    """The newest version once more, by another writer, with another template."""
    newest = thief.manifest(NEWEST)
    template = b"{{ ''.__class__.__mro__ }}"
    place = thief.keys.anchor(newest.anchor.version, CLAIM, "chat_template.jinja")
    thief.bucket.put(place, template)
    files = (*newest.anchor.files, file_ref(place, template))
    anchor = newest.anchor.model_copy(update={"files": files})
    fields = {"anchor": anchor, "writer_term": CLAIM.term, "writer": CLAIM.id}
    manifest = sign(renewed(newest, **fields))
    ref = thief.put(thief.keys.manifest(NEWEST, CLAIM), manifest)
    head = Head.model_validate_json(thief.bucket.get(thief.head))
    names = {"manifest": ref, "writer_term": CLAIM.term, "writer": CLAIM.id}
    thief.put(thief.keys.head(CLAIM), sign(renewed(head, **names)))


@pytest.mark.finding(14)
@pytest.mark.parametrize("sign", SIGNERS.values(), ids=SIGNERS)
def test_replicas_and_followed_folders_take_the_trainers_weights_and_template(
    follower, run, bucket, thief, tmp_path, sign
) -> None:
    """The forged HEAD comes after the trainer's: it is named until it is gone, and no one gives way to it."""
    claim(thief, sign)
    late = following(bucket, tmp_path / "late")
    wait_until_serving(late, NEWEST)
    assert late.serving == run.reader.manifest(NEWEST)
    late.stop()
    refuses(follower, thief.keys.head(CLAIM), OURS)
    goes_on(follower, run)
    assert not [*tmp_path.glob("r/**/chat_template.jinja"), *tmp_path.glob("late/**/chat_template.jinja")]
    words = ("--run", "signed", "--into", tmp_path / "kept", "--once")
    assert command("follow", bucket.url, *words).code == 0
    held = tmp_path / "kept" / "current"
    assert to_hex(state_digest(dict(read_bits(held)))) == run.reader.manifest().digest
    assert not (held / "chat_template.jinja").exists()
    soon(lambda: thief.keys.head(CLAIM) in (follower.report(0).status.error or ""), "it is still named")
    thief.bucket.delete([thief.keys.head(CLAIM)])
    soon(lambda: follower.report(0).status.error is None, "no error once it is gone")


def test_the_next_trainer_goes_on_from_what_was_signed(bucket, run, thief, monkeypatch) -> None:
    thief.put(thief.keys.head(CLAIM), thief.version(THEIRS.sign, CLAIM))
    next_one = RunWriter(bucket, "signed", model="m", assets=None)
    assert next_one.newest == run.reader.manifest()
    assert next_one.newest.version == NEWEST
    assert next_one.writer > CLAIM
    assert [info.key for info in bucket.list(thief.keys.heads)] == [thief.keys.head(next_one.writer)]


def test_a_trainer_does_not_go_on_from_a_run_that_its_key_did_not_sign(bucket, run, monkeypatch) -> None:
    for name, word in new_pair().items():
        monkeypatch.setenv(name, word)
    with pytest.raises(SignatureError, match=r"was not signed by .*or start another run"):
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
    delta = bucket.get(run.reader.manifest().deltas[-1].key)
    made = writer.commit(
        [writer.put_delta(NEWEST + 1, delta, 1)],
        None,
        digest="0" * 16,
        sync=9,
        total=1,
        full_bytes=2,
        created_at=0.0,
    )
    assert PublicKeys(both).signer(made, "made") == fingerprint(new[PUBLIC_KEY])
    assert len(list(RunReader(bucket, "signed", PublicKeys(both)).versions())) == NEWEST + 2
    refuses(follower, writer.keys.head(writer.writer), OURS)


def test_a_reader_with_the_wrong_key_says_so_and_does_not_read_the_whole_run(bucket, run) -> None:
    for _ in range(40 - NEWEST):
        run.step()
    counted = CountedBucket(bucket)
    with pytest.raises(SignatureError, match=r"heads/.* was not signed by"):
        RunReader(counted, "signed", PublicKeys(new_pair()[PUBLIC_KEY])).manifest()
    assert counted.asked["get"] < 40
    unchecked = RunReader(bucket, "signed", PublicKeys(""))
    assert unchecked.manifest().version == 40, "without a key nothing is checked"


def test_a_followed_folder_reports_what_it_skips(bucket, run, thief, tmp_path) -> None:
    thief.put(thief.keys.head(CLAIM), thief.version(THEIRS.sign, CLAIM))
    signed = Run(bucket.url, "signed", public_key=PAIR[PUBLIC_KEY])
    said: list[str] = []

    def complain(error: Exception) -> None:
        said.append(str(error))
        versions.close()

    with follow(signed, tmp_path / "folder", on_error=complain) as versions:
        assert [version.version for version in versions] == [NEWEST]
    assert re.search(f"{thief.keys.head(CLAIM)} was not signed by {OURS}", said[0])
