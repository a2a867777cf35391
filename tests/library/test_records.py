"""Manifests and HEAD are validated by name; a recipe is the cheapest, and a manifest names what it needs."""

import json
import tracemalloc
from contextlib import nullcontext
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.records import (
    MANIFEST_BYTES,
    MAX_REFS,
    WINDOW,
    AnchorRef,
    DeltaRef,
    FileRef,
    Head,
    Keys,
    Manifest,
    Recipe,
    Writer,
    cheapest_recipe,
    links_for,
    parse,
)
from tests.support.records import manifest_of

NAMES: dict[str, list[tuple[Any, bool]]]  # keys and names of runs, and whether records may have them
NAMES = json.loads((Path(__file__).parents[2] / "web" / "test" / "keys.json").read_text())
SHA = "0" * 64
WRITER = Writer(1, "0" * 32)


def test_a_manifest_survives_the_wire_and_half_of_one_is_refused():
    original = manifest_of(5, 3)
    assert parse(Manifest, original.to_bytes(), "key") == original
    with pytest.raises(ProtocolError, match="not a valid Manifest"):
        parse(Manifest, original.to_bytes()[:-5], "runs/demo/manifests/0")


@pytest.mark.parametrize("deltas", [[1, 3], [3], [4, 5], [2, 1]])
def test_a_chain_with_a_gap_is_refused(deltas):
    good = dict(manifest_of(3, 1)) | {"seal": ""}
    (delta, *_) = manifest_of(3, 2).deltas
    found = [delta.model_copy(update={"base": v - 1, "version": v}) for v in deltas]
    with pytest.raises(ValueError, match=r"do not lead|nothing leads"):
        Manifest(**good | {"deltas": found})


def test_a_jump_leads_forward():
    manifest = manifest_of(3, 2)
    short = dict(manifest.deltas[0]) | {"key": Keys("r").jump(3, 3, WRITER), "base": 3}
    with pytest.raises(ValueError, match="spans less than two versions"):
        Manifest(**dict(manifest) | {"jumps": [short], "seal": ""})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": -1}, "version"),
        ({"surprise": 1}, "surprise"),
        ({"format": "other/1"}, "format"),
        ({"writer": "me"}, "writer"),
        ({"version": None}, "must both be set"),
        ({"seal": SHA}, "`seal` does not match"),
        ({"manifest": {"key": "runs/../secret", "size": 1, "sha256": SHA}}, "key"),
        ({"manifest": {"key": "/etc/passwd", "size": 1, "sha256": SHA}}, "key"),
    ],
)
def test_a_wrong_head_is_refused_by_name(change, complaint):
    ref = {"key": Keys("demo").manifest(0, WRITER), "size": 1, "sha256": SHA}
    good = {"run": "demo", "born": 0.0, "version": 0, "manifest": ref, "writer_term": 1, "writer": WRITER.id}
    parse(Head, json.dumps(good).encode(), "key")
    head = good | change
    with pytest.raises(ProtocolError, match=complaint) as caught:
        parse(Head, json.dumps(head).encode(), "runs/demo/heads/1")
    assert "runs/demo/heads/1 is not a valid Head" in str(caught.value)


def check_head(run: Any, key: Any, good: bool) -> None:
    ref = {"key": key, "size": 1, "sha256": SHA}
    head = {"run": run, "born": 0.0, "version": 0, "manifest": ref, "writer_term": 1, "writer": WRITER.id}
    refused = pytest.raises(ProtocolError, match=r"^head is not a valid Head: (run|manifest\.key) ")
    with nullcontext() if good else refused:
        parse(Head, json.dumps(head).encode(), "head")


@pytest.mark.parametrize(("key", "good"), NAMES["keys"])
def test_the_keys_that_a_browser_takes(key, good):
    """The browser's tests read the same table, in `web/test/wire.test.js`."""
    check_head("demo", key, good)


@pytest.mark.parametrize(("run", "good"), NAMES["runs"])
def test_the_names_of_runs_that_a_browser_takes(run, good):
    check_head(run, "a", good)
    if isinstance(run, str) and not good:
        with pytest.raises(ProtocolError, match="is not a run name"):
            Keys(run)


@pytest.mark.parametrize("run", ["", "../x", "a/b", "a b", "x" * 97])
def test_a_run_name_is_one_plain_word(run):
    with pytest.raises(ProtocolError, match="run name"):
        Keys(run)


@pytest.mark.finding(11)
@pytest.mark.parametrize("field", ["created_at", "born"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 1e300])
def test_a_manifest_without_a_time_is_refused(field, value):
    """Its replicas would report that they took the version so many seconds later."""
    record = json.loads(manifest_of(1, 0).to_bytes()) | {field: value, "seal": ""}
    with pytest.raises(ProtocolError, match=f"not a valid Manifest: {field}"):
        parse(Manifest, json.dumps(record).encode(), "manifests/1")


def anchor(version: int, size: int) -> AnchorRef:
    return AnchorRef(version=version, files=(FileRef(key=f"a{version}", size=size, sha256=SHA),))


def key_of(base: int, version: int, part: str = "") -> str:
    keys = Keys("r")
    is_delta = version == base + 1
    return keys.delta(version, WRITER, part) if is_delta else keys.jump(base, version, WRITER, part)


def delta(base: int, version: int, size: int, part: str = "") -> DeltaRef:
    key = key_of(base, version, part)
    parts = 2 if part else 1
    return DeltaRef(key=key, size=size, sha256=SHA, base=base, version=version, changed=1, parts=parts)


Link = tuple[DeltaRef, ...]  # the parts of a delta


def every_recipe(anchor: AnchorRef, links: list[Link], version: int, held: int | None) -> list[Recipe]:
    """By brute force: each subset of the deltas that is a chain from where one may begin."""
    found = []
    for starts, first in [(anchor.version, anchor)] + ([(held, None)] if held is not None else []):
        for count in range(len(links) + 1):
            for some in combinations(sorted(links, key=lambda parts: parts[0].base), count):
                versions = [starts, *(parts[0].version for parts in some)]
                if versions[-1] == version and all(
                    parts[0].base == before for parts, before in zip(some, versions, strict=False)
                ):
                    found.append(Recipe(first, tuple(chain.from_iterable(some))))
    return found


edges = st.tuples(
    st.integers(0, 5), st.integers(1, 4), st.lists(st.integers(0, 9), min_size=1, max_size=3)
).map(
    lambda drawn: tuple(
        delta(drawn[0], drawn[0] + drawn[1], size, f".r{rank}") for rank, size in enumerate(drawn[2])
    )
)


@given(
    st.integers(0, 6),
    st.integers(0, 30),
    st.lists(edges, max_size=9, unique_by=lambda parts: parts[0].key),
    st.integers(0, 7),
    st.none() | st.integers(0, 8),
)
def test_no_way_is_cheaper(at, size, links, version, held):
    ways = every_recipe(anchor(at, size), links, version, held)
    found = cheapest_recipe(anchor(at, size), chain.from_iterable(links), version, held)
    if not ways:
        assert found is None
    else:
        assert found in ways
        assert (found.size, len(found.files)) == min((way.size, len(way.files)) for way in ways)


def with_links(deltas: list[DeltaRef], jumps: list[DeltaRef]) -> Manifest:
    """A manifest of version 3 with these; its anchor is version 0."""
    return Manifest(**dict(manifest_of(3, 0)) | {"deltas": deltas, "jumps": jumps, "seal": ""})


PARTS = [delta(v - 1, v, 9, part) for v in (1, 2, 3) for part in (".r0", ".r1")]
JUMP = [delta(0, 3, 25, ".r0"), delta(0, 3, 25, ".r1")]


def test_parts_are_taken_together():
    manifest = with_links(PARTS, JUMP)
    assert manifest.delta == tuple(PARTS[-2:])
    assert manifest.recipe().deltas == tuple(JUMP)
    assert manifest.recipe(1).deltas == tuple(PARTS[2:])
    assert with_links(PARTS, [*JUMP, delta(0, 3, 5, ".r2")]).recipe().deltas == tuple(PARTS), "55 > 54"


@pytest.mark.parametrize("part", [".r0", ".r1"])
def test_a_part_that_cannot_be_read_is_none_of_use(part):
    manifest = with_links(PARTS, JUMP)
    jump = key_of(0, 3, part)
    first = key_of(0, 1, part)
    second = key_of(1, 2, part)
    assert manifest.recipe_without({jump}).deltas == tuple(PARTS)
    assert manifest.recipe_without({second}).deltas == tuple(JUMP)
    assert manifest.recipe_without({jump, second}) is None
    assert manifest.recipe_without({jump, first}, held=1).deltas == tuple(PARTS[2:])


def test_a_recipe_of_as_many_deltas_as_a_manifest_may_name_takes_little_memory():
    """A forged manifest names them all; a recipe for each version on the way would take a gigabyte."""
    tracemalloc.start()
    try:
        deltas = (delta(v - 1, v, 1) for v in range(1, MAX_REFS + 1))
        found = cheapest_recipe(anchor(0, 1), deltas, MAX_REFS, None)
        assert len(found.deltas) == MAX_REFS
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def run_of(newest: int, strides: tuple[int, ...]) -> tuple[tuple[DeltaRef, ...], tuple[DeltaRef, ...]]:
    """Every delta of a run, and the jumps that are in the bucket when its newest version is decided."""
    deltas = tuple(delta(v - 1, v, 10) for v in range(1, newest + 1))
    return deltas, tuple(delta(v - n, v, 8 * n) for n in strides for v in range(n, newest, n))


@pytest.mark.parametrize("newest", [1, 64, 65, 1000])
def test_a_manifest_names_what_joiners_and_replicas_a_little_behind_need_and_little_else(newest):
    deltas, jumps = run_of(newest, (8, 64))
    everything = deltas + jumps
    named = sum(links_for(anchor(0, 100), deltas, jumps, newest), ())
    assert len(named) <= WINDOW + 18 + newest // 64
    for held in (None, *range(max(0, newest - WINDOW), newest + 1, 7)):
        way, best = (cheapest_recipe(anchor(0, 100), some, newest, held) for some in (named, everything))
        assert way.size == best.size, f"from {held}"


def test_without_jumps_a_manifest_names_all_deltas_since_the_anchor():
    deltas, _ = run_of(300, ())
    assert len(links_for(anchor(100, 100), deltas, (), 300)[0]) == 200
    assert len(links_for(anchor(290, 100), deltas, (), 300)[0]) == WINDOW, "past the anchor, for replicas"


def test_what_a_manifest_names_is_found_from_what_the_one_before_named():
    """A publisher knows no more than the newest manifest, after a restart too."""
    deltas, jumps = run_of(700, (8, 64))
    start = anchor(0, 100)
    links = links_for(start, (), (), 0)
    for version in range(1, 701):
        ready = tuple(jump for jump in jumps if jump.version == version - 1)
        links = links_for(start, (*links[0], deltas[version - 1]), links[1] + ready, version)
        if version % 50 == 0:
            made = tuple(jump for jump in jumps if jump.version < version)
            whole = links_for(start, deltas[:version], made, version)
            assert links[0] == whole[0]
            ways = [cheapest_recipe(start, sum(each, ()), version, None) for each in (links, whole)]
            assert ways[0] == ways[1]


def test_the_largest_manifest_that_a_trainer_writes_has_half_of_the_allowed_bytes():
    """64 ranks, 1,024 files of an anchor, and a delta or jump in 64 parts for each of 128 files of a join."""
    keys = Keys("r" * 96)
    version = 128

    def parts(key: str, base: int, end: int) -> list[DeltaRef]:
        common = {"sha256": "f" * 64, "base": base, "version": end, "changed": 10**11, "parts": 64}
        names = [key.replace(".safetensors", f".r{rank}.safetensors") for rank in range(64)]
        return [DeltaRef(key=name, size=10**9, **common) for name in names]

    deltas = chain.from_iterable(parts(keys.delta(v, WRITER), v - 1, v) for v in range(1, version + 1))
    ends = [(end - stride, end) for stride in (8, 64) for end in range(stride, version + 1, stride)]
    jumps = chain.from_iterable(parts(keys.jump(base, end, WRITER), base, end) for base, end in ends)
    names = [f"model-{number:05d}-of-01000.safetensors" for number in range(1000)]
    files = [FileRef(key=keys.anchor(0, WRITER, name), size=10**10, sha256="f" * 64) for name in names]
    largest = Manifest(
        **dict(manifest_of(version, 0))
        | {"run": keys.run, "seal": "", "signature": "f" * 128}
        | {"anchor": AnchorRef(version=0, files=tuple(files)), "deltas": tuple(deltas), "jumps": tuple(jumps)}
    )
    assert len(largest.to_bytes()) < MANIFEST_BYTES / 2
    assert parse(Manifest, largest.to_bytes(), "key") == largest
