"""A delta that claims to be large costs the dashboard no more than a small one."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from safetensors.numpy import save

from delta_weight_sync import codec
from delta_weight_sync.errors import CodecError
from inference_space.dashboard.views import MAX_TENSORS, OpenedDelta, inside, open_delta, opened
from tests.support.records import manifest_of

pytestmark = pytest.mark.finding(3)

MEMORY = 64 << 20  # bytes that a look at a delta may take
ELEMENTS = 1 << 25


def bomb(path: Path) -> Path:
    """A few kilobytes that unpack to a change of each of many elements."""
    streams = {"0.low": frame(2, ELEMENTS), "0.high": frame(0, ELEMENTS)}
    return claiming(path, [["w", [ELEMENTS], ELEMENTS, 0]], [{"mode": "dense"}], streams)


def frame(byte: int, count: int) -> np.ndarray:
    """A byte repeated, through zstd, without all of it ever being there."""
    out = zstandard.ZstdCompressor().compressobj(size=count)
    parts = [out.compress(bytes([byte]) * (1 << 20)) for _ in range(count >> 20)]
    return np.frombuffer(b"".join([*parts, out.flush()]), np.uint8)


def claiming(
    path: Path, tensors: list[object], groups: list[object], streams: dict[str, np.ndarray] | None = None
) -> Path:
    """A delta that lists `tensors`; nothing need be behind them."""
    metadata = {"tensors": json.dumps(tensors), "groups": json.dumps(groups), "base": "0", "version": "1"}
    streams = streams or {"x": np.zeros(1, np.uint8)}
    path.write_bytes(save(streams, {"format": codec.DELTA_FORMAT, **metadata}))
    return path


def peak(path: Path) -> tuple[OpenedDelta, int]:
    tracemalloc.start()
    try:
        return open_delta(path), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_is_listed_and_not_unpacked(tmp_path: Path) -> None:
    path = bomb(tmp_path / "delta")
    assert path.stat().st_size < 1 << 20
    delta, allocated = peak(path)
    assert delta.changes == ELEMENTS
    assert allocated < MEMORY
    assert "too large to be decoded" in inside(delta)


def test_a_table_alone_is_bounded(tmp_path: Path) -> None:
    names = (f"model.layers.{layer}.kind{kind}" for layer in range(300) for kind in range(200))
    path = claiming(tmp_path / "delta", [[n, [1], 1, 0] for n in names], [{"mode": "bands"}])
    delta, allocated = peak(path)
    assert allocated < MEMORY
    assert len(inside(delta)) < 10_000, "no map of 60,000 cells"
    page = opened(manifest_of(1, 0), delta, served=True)
    assert page.count("<tr>") == MAX_TENSORS + 1
    assert "and 58000 more tensors" in page


def test_a_longer_table_is_not_read_at_all(tmp_path: Path) -> None:
    """It takes twenty times its bytes."""
    path = claiming(
        tmp_path / "delta", [["w" * 2200 + str(n), [1], 1, 0] for n in range(8000)], [{"mode": "dense"}]
    )
    assert path.stat().st_size > codec.MAX_HEADER
    for read, complaint in ((open_delta, "not opened here"), (codec.Delta, "its header claims")):
        with pytest.raises(CodecError, match=complaint):
            read(path)


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (["w", [4], 1, 7], "groups"),  # a group that is not there
        (["w", [0, 4], 0, 0], "changes"),
        (["w", [4], 5, 0], "changes"),
        (["w", [10**4000] * 200, 1, 0], "less than or equal"),  # hours of arithmetic, and digits to print
        (["w", [1] * 100_000, 1, 0], "at most 32"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, tensor: list[object], complaint: str) -> None:
    path = claiming(tmp_path / "delta", [tensor], [{"mode": "dense"}])
    with pytest.raises(CodecError, match=complaint):
        open_delta(path)


def test_a_layer_of_thousands_of_digits_is_a_name(tmp_path: Path) -> None:
    name = f"model.layers.{'9' * 5000}.x"
    path = claiming(tmp_path / "delta", [[name, [1], 1, 0]], [{"mode": "bands"}])
    assert "outside the layers" in inside(open_delta(path))


def test_tensors_outside_of_layers_fill_no_page(tmp_path: Path) -> None:
    path = claiming(tmp_path / "delta", [[f"w{n}", [1], 1, 0] for n in range(60_000)], [{"mode": "bands"}])
    assert len(inside(open_delta(path))) < 50_000
