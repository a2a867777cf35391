"""A publisher that compares parameters as on a GPU publishes what any other publishes."""

import pytest

from tests.gpu.on_host import on_a_device
from tests.publish import test_sharding as ranks
from tests.publish.test_sharding import published

__all__ = ["on_a_device"]


def test_it_publishes_the_same_files(tmp_path, request):
    """With either place for the mirror, from which this encoding reads, also after a resume."""
    digest = ranks.run("whole", tmp_path / "plain", "small")
    request.getfixturevalue("on_a_device")
    for place in ("host", "device"):
        last = ranks.resume("whole", tmp_path / place, 3, ranks.STEPS, encoding="small", mirror=place)
        assert last == digest
        assert published(tmp_path / place) == published(tmp_path / "plain")


@pytest.mark.full
def test_sharded_ranks_publish_the_same_files(tmp_path):
    digest = ranks.run("whole", tmp_path / "alone", "fast")
    assert ranks.spawn(4, "mesh+device", tmp_path, ["fast"]) == [[digest]] * 4
    assert published(tmp_path / "fast") == published(tmp_path / "alone")
