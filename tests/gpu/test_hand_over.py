"""A publisher whose parameters are compared by kernels publishes what any other publishes."""

import pytest
import torch

from delta_weight_sync import Publisher
from delta_weight_sync.errors import CodecError
from tests.gpu.interpreted import kernels
from tests.publish import test_sharding as ranks
from tests.publish.test_sharding import published

__all__ = ["kernels"]


@pytest.mark.parametrize("encoding", ["fast", "small"])
def test_it_publishes_the_same_files(encoding, tmp_path, request):
    """With either place for the mirror, and from a mirror that a resumed run brought along."""
    digest = ranks.run("whole", tmp_path / "plain", encoding)
    request.getfixturevalue("kernels")
    for place in ("host", "device"):
        assert ranks.resume("whole", tmp_path / place, encoding=encoding, mirror=place) == digest
        assert published(tmp_path / place) == published(tmp_path / "plain")


@pytest.mark.full
@pytest.mark.parametrize(("layout", "size"), [("fsdp+kernels", 2), ("mesh+kernels", 4)])
def test_sharded_ranks_publish_the_same_files(layout, size, tmp_path):
    digest = ranks.run("whole", tmp_path / "alone", "fast")
    assert ranks.spawn(size, layout, tmp_path, ["fast"]) == [[digest]] * size
    assert published(tmp_path / "fast") == published(tmp_path / "alone")


def test_nothing_follows_a_hand_over_that_failed(kernels, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    publisher = Publisher((tmp_path / "bucket").as_uri(), tmp_path, mirror="device")
    publisher.publish({"a": torch.ones(5), "b": torch.ones(3)}.items())
    with pytest.raises(CodecError, match="b: shape changed"):
        publisher.publish({"a": torch.zeros(5), "b": torch.ones(4)}.items())
    with pytest.raises(CodecError, match="b: shape changed"):
        publisher.publish({"a": torch.zeros(5), "b": torch.ones(3)}.items())
    publisher.close()
