"""Who may write to the bucket and has not the key changes neither weights nor templates."""

from __future__ import annotations

from hashlib import sha256

import pytest

from delta_weight_sync.checkpoint import read_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.records import FileRef, Head, Writer
from tests.cli.command import command
from tests.support.fake_vllm import reaches
from tests.vllm.thief import (
    NEWEST,
    OURS,
    SIGNERS,
    Signs,
    Thief,
    following,
    goes_on,
    refuses,
    renewed,
)

pytestmark = pytest.mark.finding(14)

CLAIM = Writer(99, "e" * 32)


def claim(thief: Thief, sign: Signs) -> None:
    """The newest version once more, by another writer, with another template."""
    newest = thief.manifest(NEWEST)
    template = b"{{ ''.__class__.__mro__ }}"
    place = thief.keys.anchor(newest.anchor.version, CLAIM, "chat_template.jinja")
    thief.bucket.put(place, template)
    ours = FileRef(key=place, size=len(template), sha256=sha256(template).hexdigest())
    files = (*newest.anchor.files, ours)
    anchor = newest.anchor.model_copy(update={"files": files})
    fields = {"anchor": anchor.model_dump(), "writer_term": CLAIM.term, "writer": CLAIM.id}
    manifest = sign(renewed(newest, **fields))
    ref = thief.put(thief.keys.manifest(NEWEST, CLAIM), manifest)
    head = Head.model_validate_json(thief.bucket.get(thief.head))
    names = {"manifest": ref, "writer_term": CLAIM.term, "writer": CLAIM.id}
    thief.put(thief.keys.head(CLAIM), sign(renewed(head, **names)))


@pytest.mark.parametrize("sign", SIGNERS.values(), ids=SIGNERS)
def test_a_replica_keeps_its_weights_and_its_template(run, bucket, thief, tmp_path, sign) -> None:
    follower = following(bucket, tmp_path / "r")
    reaches(follower, NEWEST)
    claim(thief, sign)
    refuses(follower, thief.keys.head(CLAIM), OURS)
    goes_on(follower, run)
    assert not list((tmp_path / "r").rglob("chat_template.jinja"))
    follower.stop()


@pytest.mark.parametrize("sign", SIGNERS.values(), ids=SIGNERS)
def test_one_that_joins_and_a_folder_that_is_kept_take_the_trainers(
    run, bucket, thief, tmp_path, sign
) -> None:
    claim(thief, sign)
    follower = following(bucket, tmp_path / "r")
    reaches(follower, NEWEST)
    assert follower.serving == run.reader.manifest(NEWEST)
    follower.stop()
    words = ("--run", "signed", "--into", tmp_path / "kept", "--once")
    assert command("follow", bucket.url, *words).code == 0
    held = tmp_path / "kept" / "current"
    assert to_hex(state_digest(dict(read_bits(held)))) == run.reader.manifest().digest
    assert not (held / "chat_template.jinja").exists()
