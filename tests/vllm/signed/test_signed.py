"""Who can write to the bucket and has not the key: what it puts there is refused by name, serving goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from delta_weight_sync.records import Head, Manifest, Writer
from delta_weight_sync.vllm.follower import Follower
from tests.support.fake_vllm import reaches, soon
from tests.support.real_run import RealRun
from tests.vllm.thief import (
    NEWEST,
    OURS,
    SIGNERS,
    THEIRS,
    Signs,
    Thief,
    goes_on,
    refuses,
    renewed,
    unsigned,
)


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
    follower.commands.pause()
    thief.bucket.put(thief.head, thief.then(1, thief.head))
    follower.commands.resume()
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
    follower.commands.pause()
    manifest = run.step()
    thief.bucket.put(thief.key_of(manifest), forge(thief, manifest))
    follower.commands.resume()
    refuses(follower, thief.key_of(manifest))
    goes_on(follower, run, NEWEST + 2)


@pytest.mark.parametrize("sign", SIGNERS.values(), ids=SIGNERS)
def test_forged_manifest_and_head_that_name_each_other(
    follower: Follower, run: RealRun, thief: Thief, sign: Signs
) -> None:
    """The hashes fit: only the signatures do not."""
    follower.commands.pause()
    manifest = run.step()
    forged = sign(renewed(manifest, digest="0" * 16))
    ref = thief.put(thief.key_of(manifest), forged)
    head = Head.model_validate_json(thief.bucket.get(thief.head))
    thief.put(thief.head, sign(renewed(head, manifest=ref)))
    follower.commands.resume()
    refuses(follower, thief.head, OURS)
    goes_on(follower, run, NEWEST + 2)


@pytest.mark.parametrize("version", [NEWEST, NEWEST + 1])
@pytest.mark.parametrize("size", [None, 100, 0])
def test_a_delta_that_is_swapped_or_truncated(
    follower: Follower, run: RealRun, thief: Thief, version: int, size: int | None
) -> None:
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
    writer = Writer(99, "e" * 32)
    real = thief.manifest(2)
    names = {"writer_term": writer.term, "writer": writer.id, "digest": "0" * 16}
    thief.put(thief.keys.manifest(2, writer), THEIRS.sign(renewed(real, **names)))
    follower.commands.pin(2)
    reaches(follower, 2)
    assert follower.serving == real
