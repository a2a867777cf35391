"""A delta may come from anyone: an error by name, in little memory, whatever is in the file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zstandard
from pydantic import ValidationError

from delta_weight_sync import codec
from delta_weight_sync.codec._file import DELTA_FORMAT
from delta_weight_sync.codec.groups import GROUP_ELEMENTS, encode_group
from delta_weight_sync.errors import CodecError
from tests.fuzz.deltas import OLD, Parts, check, decoded, mutate, put_together, seeds, take_apart


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "delta.safetensors"
    for file in seeds().values():  # loads the kernels, whose code is not the reader's memory
        path.write_bytes(file)
        assert decoded(path)
    return path


def refusal(path: Path, parts: Parts, old: dict[str, np.ndarray] = OLD) -> CodecError:
    """The error that `parts` gives, which names the file in a line and took little memory."""
    path.write_bytes(put_together(parts))
    assert not check(path, old)
    with pytest.raises(CodecError) as caught:
        list(codec.Delta(path).patches({n: b.shape for n, b in old.items()}, old.__getitem__))
    return caught.value


def group(parts: Parts, mode: str) -> dict[str, Any]:
    return next(one for one in parts.metadata["groups"] if one["mode"] == mode)


def with_groups(tensors: list[Any], groups: list[Any]) -> Parts:
    versions = {"format": DELTA_FORMAT, "base": "0", "version": "1"}
    return Parts(versions | {"tensors": tensors, "groups": groups}, {})


def test_the_seeds_of_the_fuzzer_have_every_mode(path):
    modes = set()
    flipped = set()
    for file in seeds().values():
        path.write_bytes(file)
        assert check(path)
        for one in codec.Delta(path).groups:
            modes.add(one.mode)
            flipped |= {(one.mode, flip) for _, _, flip, _ in one.gaps}
    assert modes == {"gaps", "bands", "mask", "dense", "raw"}
    assert flipped == {(mode, flip) for mode in ("gaps", "bands") for flip in (True, False)}


def test_hundreds_of_damaged_files(path):
    """The fuzzer's first cases, always the same ones."""
    rng = Random(1)
    files = list(seeds().values())
    accepted = []
    for _ in range(300):
        path.write_bytes(mutate(rng.choice(files), rng))
        accepted.append(check(path))
    assert 0 < sum(accepted) < 300


@pytest.mark.long
def test_thousands_of_damaged_files_with_every_index_checked(pytestconfig):
    """The fuzzer, with the kernels compiled so that an access outside an array is an IndexError."""
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(pytestconfig.cache.mkdir("checked-kernels"))}
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "3000", "--seed", "1"]
    done = subprocess.run(command, env=os.environ | checked, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3000 cases" in done.stdout


@pytest.mark.parametrize("wrong", [{}, {"large": [[0, 0, False, 0]] * 2, "sizes": [[0, 0]] * 2}])
def test_a_mask_with_another_number_of_bands_reads_no_band_that_is_not_there(path, wrong):
    parts = take_apart(seeds()["mask"])
    one = group(parts, "mask")
    del one["large"], one["sizes"]
    one.update(wrong)
    assert "the lists of a group of mode mask have" in str(refusal(path, parts))


@pytest.mark.parametrize("dtype", ["BF16", "F8_E5M2", "F8_E8M0", "F4", "I8", "BOOL"])
def test_streams_of_another_type_are_refused(path, dtype):
    parts = take_apart(seeds()["gaps"])
    _, (size,), content = parts.streams["0.gaps"]
    items = {"BF16": size // 2, "F4": 2 * size}.get(dtype, size)
    parts.streams["0.gaps"] = (dtype, [items], content[: size // 2 * 2] if dtype == "BF16" else content)
    assert "stream 0.gaps is not bytes" in str(refusal(path, parts))


_GROUPS = [
    {"mode": "gaps", field: parameters}
    for field in ("limits", "gaps", "large", "sizes")
    for parameters in (["x"] * 99, [[0] * 99], [[0, 0, False, ""]] * 99)
]


@pytest.mark.parametrize(
    ("tensors", "groups"),
    [
        ([0] * 99, []),
        ([["w", [""] * 99, 1, 0]], []),
        ([["w", [], 1, *[0] * 99]], []),
        *(([["w", [8], 1, 0]], [one]) for one in _GROUPS),
    ],
)
def test_many_errors_of_a_table_are_one_error(path, tensors, groups):
    """An error report of each takes hundreds of bytes of memory for two bytes of the file."""
    cause: Any = refusal(path, with_groups(tensors, groups)).__cause__
    assert cause.error_count() == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [("\x1b[31mgo\n\x07ld", r"it changes \x1b[31mgo\n\x07ld [30, 50]"), ("x" * 100_000, "xxx")],
)
def test_an_error_repeats_no_pages_and_no_terminal_codes_of_the_file(path, name, said):
    parts = take_apart(seeds()["gaps"])
    parts.metadata["tensors"][0][0] = name
    assert said in str(refusal(path, parts))


def test_groups_without_tensors_and_streams_that_are_cut_are_refused(path):
    """Empty groups would cost the reader time for each of its tensors."""
    parts = take_apart(seeds()["dense"])
    parts.metadata["groups"] += [{"mode": "dense"}] * 50
    assert "its tensors must name each of its 54 groups, and no others" in str(refusal(path, parts))
    parts = take_apart(seeds()["dense"])
    dtype, (size,), content = parts.streams["0.low"]
    parts.streams["0.low"] = (dtype, [size - 3], content[:-3])
    refusal(path, parts)


def test_a_group_of_the_whole_model_is_refused(path):
    """A few bytes of zstd would be unpacked for all elements of the model."""
    old = {"a": np.zeros(GROUP_ELEMENTS, np.uint16), "b": np.zeros(8, np.uint16)}
    parts = with_groups([["a", [GROUP_ELEMENTS], 1, 0], ["b", [8], 1, 0]], [{"mode": "dense"}])
    assert f"group 0 goes on after {GROUP_ELEMENTS} elements" in str(refusal(path, parts, old))


@pytest.mark.parametrize("size", [0, 1499, 1501, 1 << 40, None])
def test_a_frame_of_another_size_is_not_unpacked(path, size):
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1500))
    if size is not None:  # the frame header with an eight-byte content size, and the same blocks
        parameters = zstandard.get_frame_parameters(frame)
        assert parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN
        frame = frame[:4] + bytes([frame[4] | 0xC0]) + frame[5:6] + size.to_bytes(8, "little") + frame[6:]
        assert zstandard.frame_content_size(frame) == size
    old = {"w": OLD["a.weight"]}
    parts = with_groups([["w", [30, 50], 1, 0]], [{"mode": "dense"}])
    parts.streams.update({name: ("U8", [len(frame)], frame) for name in ("0.low", "0.high")})
    assert "a compressed stream does not hold 1500 bytes" in str(refusal(path, parts, old))


@pytest.mark.parametrize("mode", ["gaps", "bands", "mask", "dense", "raw"])
def test_a_million_changes_in_few_bytes_take_the_stated_memory(path, mode):
    """Everything moves by the same: the fewest bytes of file for the most of output."""
    old = {"w": np.random.default_rng(0).integers(0, 65536, 1_000_000).astype(np.uint16)}
    patch = codec.diff("w", old["w"], old["w"] + np.uint16(1))
    one, streams = encode_group(mode, [patch], old.__getitem__)
    parts = with_groups([["w", [1_000_000], 1_000_000, 0]], [json.loads(one.model_dump_json())])
    parts.streams.update({f"0.{name}": ("U8", [s.size], s.tobytes()) for name, s in streams.items()})
    path.write_bytes(put_together(parts))
    assert check(path, old)
    parts.metadata["tensors"][0][2] -= 1
    refusal(path, parts, old)


@pytest.mark.parametrize("spell", ["sorted backwards", "indented", "escaped"])
def test_a_table_may_be_spelled_and_sorted_in_any_way_that_json_allows(path, spell):
    parts = take_apart(seeds()["mixed"])
    path.write_bytes(put_together(parts))
    shapes = {name: bits.shape for name, bits in OLD.items()}
    expected = codec.Delta(path)
    patches = {p.name: p for p in expected.patches(shapes, OLD.__getitem__)}
    table = parts.metadata["tensors"]
    if spell == "sorted backwards":
        table.sort(key=lambda row: -row[3])
    text = json.dumps(table, indent=1 if spell == "indented" else None)
    parts.metadata["tensors"] = text.replace("a", "\\u0061") if spell == "escaped" else text
    path.write_bytes(put_together(parts))
    delta = codec.Delta(path)
    assert {*delta.tensors} == {*expected.tensors}
    for patch in delta.patches(shapes, OLD.__getitem__):
        np.testing.assert_array_equal(patch.index, patches[patch.name].index)
        np.testing.assert_array_equal(patch.ulps, patches[patch.name].ulps)


@pytest.mark.parametrize("number", ["08", "1 2", "-1", "1.0", "1e1", str(1 << 64), "true", '"1"', "null"])
def test_a_number_of_the_table_is_a_whole_number_in_json(path, number):
    parts = with_groups([["w", [8], 1, 0]], [])
    for at in ("[8]", "1,", "0]"):
        parts.metadata["tensors"] = '[["w", [8], 1, 0]]'.replace(at, at.replace(at.strip("[],"), number), 1)
        assert isinstance(refusal(path, parts).__cause__, ValidationError)
