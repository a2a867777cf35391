"""Manifests and HEAD are validated at the boundary; whatever is wrong is named."""

import json

import pytest

from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.records import AnchorRef, DeltaRef, FileRef, Head, Keys, Manifest, Writer, parse

SHA = "0" * 64
KEYS = Keys("demo")
WRITER = Writer(1, "0" * 32)


def anchor(version: int) -> AnchorRef:
    key = KEYS.anchor(version, WRITER, "model.safetensors")
    return AnchorRef(version=version, files=(FileRef(key=key, size=9, sha256=SHA),))


def delta(version: int) -> DeltaRef:
    return DeltaRef(
        key=KEYS.delta(version, WRITER), size=1, sha256=SHA, base=version - 1, version=version, changed=1
    )


def manifest(version: int, at: int, deltas: list[int]) -> Manifest:
    return Manifest(
        run="demo",
        born=0.0,
        version=version,
        writer_term=1,
        writer=WRITER.id,
        sync=1,
        created_at=0.0,
        digest="0" * 16,
        anchor=anchor(at),
        deltas=tuple(delta(v) for v in deltas),
        jumps=(),
        parent=FileRef(key=KEYS.manifest(version - 1, WRITER), size=1, sha256=SHA) if version else None,
        changed=1,
        total=100,
        full_bytes=200,
    )


def test_a_manifest_survives_the_wire():
    original = manifest(5, 3, [2, 3, 4, 5])
    assert parse(Manifest, original.to_bytes(), "key") == original


def test_the_way_from_any_version():
    newest = manifest(5, 3, [2, 3, 4, 5])
    assert [d.version for d in newest.recipe(3).deltas] == [4, 5]
    assert [d.version for d in newest.recipe(1).deltas] == [2, 3, 4, 5]
    assert newest.recipe(5) == (None, ())
    assert newest.recipe(0) == newest.recipe() == (anchor(3), newest.deltas[2:]), (
        "only the anchor leads from there"
    )
    assert newest.recipe(6).anchor, "a version that this run never had"


@pytest.mark.parametrize("deltas", [[1, 3], [3], [4, 5], [2, 1]])
def test_a_chain_with_a_gap_is_refused(deltas):
    with pytest.raises(ValueError, match=r"do not lead|nothing leads"):
        manifest(3, 1, deltas)


def test_a_delta_leads_forward():
    with pytest.raises(ValueError, match="leads from version 3 back to 3"):
        delta(3).model_validate(delta(3).model_dump() | {"base": 3})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": -1}, "version"),
        ({"surprise": 1}, "surprise"),
        ({"format": "other/1"}, "format"),
        ({"writer": "me"}, "writer"),
        ({"version": None}, "a version has a manifest"),
        ({"seal": SHA}, "seal does not fit"),
        ({"manifest": {"key": "runs/../secret", "size": 1, "sha256": SHA}}, "leaves its folder"),
        ({"manifest": {"key": "/etc/passwd", "size": 1, "sha256": SHA}}, "key"),
    ],
)
def test_a_wrong_head_is_refused_by_name(change, complaint):
    ref = {"key": KEYS.manifest(0, WRITER), "size": 1, "sha256": SHA}
    good = {"run": "demo", "born": 0.0, "version": 0, "manifest": ref, "writer_term": 1, "writer": WRITER.id}
    parse(Head, json.dumps(good).encode(), "key")
    head = good | change
    with pytest.raises(ProtocolError, match=complaint) as caught:
        parse(Head, json.dumps(head).encode(), "runs/demo/heads/1")
    assert "runs/demo/heads/1 is not a valid Head" in str(caught.value)


@pytest.mark.parametrize("run", ["", "../x", "a/b", "a b", "x" * 97])
def test_a_run_name_is_one_plain_word(run):
    with pytest.raises(ProtocolError, match="run name"):
        Keys(run)


def test_half_a_json_is_refused():
    with pytest.raises(ProtocolError, match="not a valid Manifest"):
        parse(Manifest, manifest(0, 0, []).to_bytes()[:-5], "runs/demo/manifests/0")
