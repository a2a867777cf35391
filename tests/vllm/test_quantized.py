"""What a follower says of a vLLM that quantizes. tests/live/test_schemes.py proves what such a vLLM holds."""

from collections.abc import Iterator

import pytest

from delta_weight_sync.runlog import Quantization
from delta_weight_sync.vllm import follower as followers
from delta_weight_sync.vllm.follower import Follower
from tests.support.buckets import CountedBucket
from tests.support.fake_vllm import InMemoryVllm, soon, wait_until_serving
from tests.support.real_run import RealRun


@pytest.fixture
def run(bucket: CountedBucket) -> Iterator[RealRun]:
    run = RealRun(bucket.bucket, run="quantized", layers=1)
    yield run
    run.close()


def quantized(changed: int) -> Quantization:
    return Quantization(scheme="fp8_per_block", digest="0123456789abcdef", changed=changed)


def step(follower: Follower, run: RealRun) -> None:
    run.step()
    wait_until_serving(follower, run.newest.version)


def test_the_status_has_the_digest_of_what_is_served_quantized(follower, run, vllm: InMemoryVllm) -> None:
    assert follower.report(0).status.quantized is None, "nothing is served yet"
    vllm.quantized = quantized(7)
    follower.start()
    wait_until_serving(follower, 0)
    assert follower.report(0).status.quantized == vllm.quantized


def test_versions_that_change_no_quantized_weight_are_warned_of(
    follower, run, vllm: InMemoryVllm, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(followers, "_UNMOVED", 2)
    vllm.quantized = quantized(0)
    follower.start()
    wait_until_serving(follower, 0)
    step(follower, run)
    assert "changed no quantized weight" not in follower.report(0).notice
    step(follower, run)
    said = "the last 2 versions changed no quantized weight"
    soon(lambda: said in follower.report(0).notice, "the notice")
    step(follower, run)
    soon(lambda: "the last 3 versions" in follower.report(0).notice, "the notice")
    assert [record.message.count(said) for record in caplog.records].count(1) == 1, "it is logged once"
    vllm.quantized = quantized(1)
    step(follower, run)
    soon(lambda: "changed no quantized weight" not in follower.report(0).notice, "no notice")


def test_a_vllm_that_does_not_quantize_is_not_warned_of(follower, run, monkeypatch) -> None:
    monkeypatch.setattr(followers, "_UNMOVED", 1)
    follower.start()
    wait_until_serving(follower, 0)
    step(follower, run)
    assert "quantized" not in follower.report(0).notice
