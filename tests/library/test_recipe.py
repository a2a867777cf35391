"""The cheapest way to a version, against trying every one; and what a manifest has to name for it."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_weight_sync.records import (
    WINDOW,
    AnchorRef,
    DeltaRef,
    FileRef,
    Links,
    Recipe,
    cheapest_recipe,
    links_for,
)

SHA = "0" * 64


def anchor(version: int, size: int) -> AnchorRef:
    return AnchorRef(version=version, files=(FileRef(key=f"a{version}", size=size, sha256=SHA),))


def delta(base: int, version: int, size: int) -> DeltaRef:
    return DeltaRef(key=f"{base}-{version}", size=size, sha256=SHA, base=base, version=version, changed=1)


def every_recipe(anchor: AnchorRef, deltas: list[DeltaRef], version: int, held: int | None) -> list[Recipe]:
    """By brute force: each subset of the deltas that is a chain from where one may begin."""
    found = []
    for starts, first in [(anchor.version, anchor)] + ([(held, None)] if held is not None else []):
        for count in range(len(deltas) + 1):
            for some in combinations(sorted(deltas, key=lambda delta: delta.base), count):
                versions = [starts, *(delta.version for delta in some)]
                if versions[-1] == version and all(
                    delta.base == before for delta, before in zip(some, versions, strict=False)
                ):
                    found.append(Recipe(first, some))
    return found


edges = st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 9)).map(
    lambda drawn: delta(drawn[0], drawn[0] + drawn[1], drawn[2])
)


@given(
    st.integers(0, 6),
    st.integers(0, 30),
    st.lists(edges, max_size=9, unique_by=lambda delta: delta.key),
    st.integers(0, 7),
    st.none() | st.integers(0, 8),
)
def test_no_way_is_cheaper(at, size, deltas, version, held):
    ways = every_recipe(anchor(at, size), deltas, version, held)
    found = cheapest_recipe(anchor(at, size), deltas, version, held)
    if not ways:
        assert found is None
    else:
        assert found in ways
        assert found.size == min(way.size for way in ways)


def test_of_equal_bytes_fewer_files_are_taken():
    ones, jump = [delta(v, v + 1, 10) for v in range(8)], delta(0, 8, 80)
    way = cheapest_recipe(anchor(0, 1), [*ones, jump], 8, None)
    assert way is not None
    assert way.deltas == (jump,)


def run_of(newest: int, strides: tuple[int, ...]) -> tuple[list[DeltaRef], list[DeltaRef]]:
    """Every delta of a run, and the jumps that are in the bucket when its newest version is decided."""
    deltas = [delta(v - 1, v, 10) for v in range(1, newest + 1)]
    jumps = [delta(v - n, v, 8 * n) for n in strides for v in range(n, newest, n)]
    return deltas, jumps


@pytest.mark.parametrize("newest", [1, 64, 65, 1000])
def test_a_manifest_names_what_joiners_and_replicas_a_little_behind_need_and_little_else(newest):
    deltas, jumps = run_of(newest, (8, 64))
    names = links_for(anchor(0, 100), deltas, jumps, newest)
    assert len(names.deltas) + len(names.jumps) <= WINDOW + 18 + newest // 64
    everything, named = [*deltas, *jumps], [*names.deltas, *names.jumps]
    for held in (None, *range(max(0, newest - WINDOW), newest + 1, 7)):
        way, best = (cheapest_recipe(anchor(0, 100), some, newest, held) for some in (named, everything))
        assert way is not None
        assert best is not None
        assert way.size == best.size, f"from {held}"


def test_without_jumps_a_manifest_names_all_deltas_since_the_anchor():
    deltas, _ = run_of(300, ())
    assert len(links_for(anchor(100, 100), deltas, [], 300).deltas) == 200
    assert len(links_for(anchor(290, 100), deltas, [], 300).deltas) == WINDOW, "past the anchor, for replicas"


def test_what_a_manifest_names_is_found_from_what_the_one_before_named():
    """A publisher knows no more than the newest manifest, after a restart too."""
    deltas, jumps = run_of(700, (8, 64))
    known = links_for(anchor(0, 100), (), (), 0)
    for version in range(1, 701):
        ready = [jump for jump in jumps if jump.version == version - 1]
        known = links_for(
            anchor(0, 100), (*known.deltas, deltas[version - 1]), (*known.jumps, *ready), version
        )
        if version % 50 == 0:
            made = [jump for jump in jumps if jump.version < version]
            whole = links_for(anchor(0, 100), deltas[:version], made, version)
            assert known.deltas == whole.deltas
            assert way(known, version) == way(whole, version)


def way(names: Links, version: int) -> Recipe | None:
    return cheapest_recipe(anchor(0, 100), (*names.deltas, *names.jumps), version, None)
