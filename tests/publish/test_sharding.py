"""Several trainer processes publish the bytes that a single one publishes, and stop together."""

from pathlib import Path

import pytest
import torch

from delta_weight_sync.errors import StateError
from delta_weight_sync.publish.sharding import Shards
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest
from delta_weight_sync.store import open_bucket
from tests.publish import ranks


def published(folder: Path) -> list[tuple[int, str, bytes]]:
    """Version, digest, and the file that leads to it, newest first."""
    bucket = open_bucket((folder / "bucket").as_uri())
    return [(m.version, m.digest, bucket.get(key(m))) for m in RunReader(bucket, "run").versions()]


def key(manifest: Manifest) -> str:
    if manifest.version:
        return manifest.deltas[-1].key
    return next(file.key for file in manifest.anchor.files if file.key.endswith(".safetensors"))


@pytest.mark.full
@pytest.mark.parametrize(("layout", "size"), [("fsdp", 2), ("mesh", 4)])
def test_sharded_ranks_publish_what_a_single_process_publishes(layout, size, tmp_path):
    levels = ["fast", "small"]
    digests = [ranks.run("whole", tmp_path / "alone" / encoding, encoding) for encoding in levels]
    jobs = [*levels, "fast:base"]
    assert ranks.spawn(size, layout, tmp_path, jobs) == [[*digests, digests[0]]] * size
    for job in jobs:
        versions = published(tmp_path / job)
        assert [version for version, *_ in versions] == [4, 3, 2, 1, 0]
        assert versions == published(tmp_path / "alone" / job.removesuffix(":base"))


@pytest.mark.full
@pytest.mark.parametrize(("layout", "size"), [("fsdp", 2), ("mesh", 4)])
def test_ranks_that_rise_publish_what_they_would_have(layout, size, tmp_path):
    """Each puts its own shards back; the state is older than the newest version, which comes once."""
    digest = ranks.run("whole", tmp_path / "alone", "fast")
    assert ranks.spawn(size, layout, tmp_path, ["resume"]) == [[digest]] * size
    assert published(tmp_path / "resume") == published(tmp_path / "alone")
    states = open_bucket((tmp_path / "resume" / "bucket").as_uri()).list("runs/run/state/")
    folders = {info.key.removesuffix(".json") for info in states if info.key.endswith(".json")}
    objects = [info.key.rpartition("/")[0] for info in states if not info.key.endswith(".json")]
    assert sorted(objects) == sorted([*folders] * size)
    assert len(folders) == 2
    with pytest.raises(StateError, match=f"saved by {size} processes, not 1: start as many again"):
        ranks.resume("whole", tmp_path / "resume")


@pytest.mark.full
def test_a_fault_on_one_rank_stops_all_with_its_sentence(tmp_path):
    """In the base, where ranks gather tensors in full, and later, where they send what changed."""
    first, second = ranks.spawn(2, "fsdp", tmp_path, ["fast:0:0", "fast:1:0", "fast:0:2", "fast:1:2"])
    own, told = "MemoryError: no room", "PeerError: rank {} of the trainer stopped the run: {}"
    assert first == [own, told.format(1, own), own, told.format(1, own)]
    assert second == [told.format(0, own), own, told.format(0, own), own]


def test_a_rank_whose_layout_changed_says_so():
    """Its mirror would no longer be that of the elements it sends."""
    shards = Shards("host")
    shards.begin([("w", torch.ones(3))])
    with pytest.raises(ValueError, match="other is not sharded as it was at the first sync"):
        shards.changes([("other", torch.ones(3))])
