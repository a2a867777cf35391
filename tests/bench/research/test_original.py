"""The first work's layout carries a change exactly, in the library's terms and in the authors'."""

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from bench.research import original
from delta_weight_sync.errors import CodecError
from tests.bench.test_arithmetic import change


def test_patches_survive_the_file(tmp_path):
    measured = change(0.02)
    (tmp_path / "delta").write_bytes(original.write(measured.patches, measured.old.__getitem__))
    (read,) = original.read(tmp_path / "delta", measured.shapes, measured.old.__getitem__)
    np.testing.assert_array_equal(read.index, measured.patches[0].index)
    np.testing.assert_array_equal(read.ulps, measured.patches[0].ulps)


@pytest.mark.parametrize("positions", [[5, 3], [4, 4], [-1, 3], [3, 8]])
def test_impossible_positions_are_refused(tmp_path, positions):
    tensors = {"w.indices": torch.tensor(positions), "w.values": torch.ones(2, dtype=torch.bfloat16)}
    (tmp_path / "delta").write_bytes(save(tensors))
    with pytest.raises(CodecError, match="positions of w"):
        list(original.read(tmp_path / "delta", {"w": (8,)}, {"w": np.zeros(8, np.uint16)}.__getitem__))


def test_tensors_arrive_on_the_other_side(tmp_path):
    measured = change(0.02)
    before = {"w": torch.from_numpy(measured.old["w"].copy()).view(torch.bfloat16)}
    snapshot, replica = {"w": before["w"].clone()}, {"w": before["w"].clone()}
    measured.taken()
    live = torch.from_numpy(measured.old["w"]).view(torch.bfloat16)
    file = original.publish(snapshot, [("w", live.float())])
    assert set(load(file)) == {"w.indices", "w.values"}
    (tmp_path / "delta").write_bytes(file)
    original.receive(tmp_path / "delta", replica)
    for tensor in (snapshot["w"], replica["w"]):
        assert torch.equal(tensor.view(torch.int16), live.view(torch.int16))
