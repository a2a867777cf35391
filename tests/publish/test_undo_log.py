"""Earlier hand-overs, had back from what each of them changed."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from delta_weight_sync import Publisher, codec, open_run
from delta_weight_sync.checkpoint import to_bits
from delta_weight_sync.errors import UndoLogError
from delta_weight_sync.publish.outbox import UndoLog, bf16_bits

SYNCS = 5
PATIENCE_S = 300.0  # for what happens at once; only a fault takes so long
EVERY = np.arange(1 << 16).astype(np.uint16)  # of the patterns: -0.0, infinities and all that is not a number
DTYPES = [torch.float32, torch.bfloat16]


def weights_of(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """bf16 patterns as weights; float32 by hand, for a cast may change what is not a number."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(bits.view(np.int16).copy()).view(dtype)
    return torch.from_numpy((bits.astype(np.uint32) << 16).view(np.int32)).view(dtype)


@pytest.fixture(scope="module")
def walk() -> list[dict[str, np.ndarray]]:
    """Bits at the hand-overs 1 to 5: "every" pattern becomes another one, of "few" two weights move."""
    numbers = np.random.default_rng(0)
    states = []
    few = np.zeros((40, 30), np.uint16)
    for sync in range(SYNCS):
        few = few.copy()
        few[sync, 2 * sync : 2 * sync + 2] = 0x8000 - sync
        states.append({"every": numbers.permutation(EVERY), "few": few})
    return states


def past_of(walk: list[dict[str, np.ndarray]], keep: int = SYNCS) -> UndoLog:
    past = UndoLog(1, keep)
    for sync, (old, new) in enumerate(itertools.pairwise(walk), start=2):
        past.add(sync, [codec.diff(name, old[name], new[name]) for name in old])
    return past


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_hand_over_is_had_from_any_other_by_writing_what_lies_between(walk, dtype):
    past = past_of(walk)
    for start, end in itertools.product(range(1, SYNCS + 1), repeat=2):
        weights = {name: weights_of(bits, dtype) for name, bits in walk[start - 1].items()}
        written = past.roll(weights, start, end)
        for name, bits in walk[end - 1].items():
            expected = weights_of(bits, dtype)
            assert torch.equal(bf16_bits(weights[name]), bf16_bits(expected)), (name, start, end)
            if dtype == torch.float32:
                assert torch.equal(weights[name].view(torch.int32), expected.view(torch.int32))
        low, high = sorted((start, end))
        between = itertools.pairwise(walk[low - 1 : high])
        assert written == sum(int((old[name] != new[name]).sum()) for old, new in between for name in old)


def test_what_is_not_kept_is_refused_before_anything_is_written(walk):
    past = past_of(walk, keep=2)
    assert past.syncs == [3, 4, 5]
    weights = {name: weights_of(bits, torch.float32) for name, bits in walk[4].items()}
    with pytest.raises(UndoLogError, match="the undo log holds syncs 3 to 5, not 2; keep more of them"):
        past.roll(weights, 5, 2)
    assert torch.equal(bf16_bits(weights["every"]), torch.from_numpy(walk[4]["every"].view(np.int16)))
    past.roll(weights, 5, 3)
    assert torch.equal(bf16_bits(weights["every"]), torch.from_numpy(walk[2]["every"].view(np.int16)))


def test_weights_that_cannot_hold_every_published_one_are_refused():
    with pytest.raises(ValueError, match=r"torch\.float16 do not hold every bf16: use float32 or bfloat16"):
        bf16_bits(torch.zeros(3, dtype=torch.float16))


def test_a_hand_over_that_became_no_version_of_its_own_is_had_back_too(tmp_path: Path):
    """The link is slow, so hand-overs 2 to 4 become one version."""
    (tmp_path / "config.json").write_text("{}")
    url, up = f"{tmp_path.as_uri()}/bucket#run", threading.Event()
    weights = {"a": torch.ones(50, 40), "b": torch.ones(9)}
    handed_over = {}
    with Publisher(url, tmp_path) as publisher:
        publisher.publish(weights.items())
        past, put = publisher.keep_undo_log(SYNCS), publisher._writer.put_delta
        publisher._writer.put_delta = lambda *arguments: (up.wait(PATIENCE_S), put(*arguments))[1]
        for sync in range(2, SYNCS + 1):
            weights["a"][sync] += 0.1
            weights["b"][sync - 2 :] *= 1.5
            publisher.publish(weights.items())
            handed_over[sync] = {name: to_bits(tensor) for name, tensor in weights.items()}
        up.set()
        newest = publisher.flush()
    assert newest.version < SYNCS - 1
    rolled, at = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, SYNCS
    for sync in (3, 2, 4, 5):
        past.roll(rolled, at, sync)
        at = sync
        for name, bits in handed_over[sync].items():
            np.testing.assert_array_equal(to_bits(rolled[name]), bits)
    state = open_run(url).checkout(newest, tmp_path / "out")
    np.testing.assert_array_equal(to_bits(rolled["a"]), state["a"])
