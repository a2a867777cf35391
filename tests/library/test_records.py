"""Manifests and HEAD are validated at the boundary; whatever is wrong is named."""

import json

import pytest

from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.records import Head, Keys, Manifest, Writer, parse
from tests.support.records import manifest_of

SHA = "0" * 64
KEYS = Keys("demo")
WRITER = Writer(1, "0" * 32)


def test_a_manifest_survives_the_wire():
    original = manifest_of(5, 3)
    assert parse(Manifest, original.to_bytes(), "key") == original


@pytest.mark.parametrize("deltas", [[1, 3], [3], [4, 5], [2, 1]])
def test_a_chain_with_a_gap_is_refused(deltas):
    good, delta = manifest_of(3, 1).model_dump(exclude={"seal"}), manifest_of(3, 2).deltas[0]
    found = [delta.model_copy(update={"base": v - 1, "version": v}) for v in deltas]
    with pytest.raises(ValueError, match=r"do not lead|nothing leads"):
        Manifest(**good | {"deltas": found})


def test_a_delta_leads_forward():
    delta = manifest_of(3, 2).deltas[0]
    with pytest.raises(ValueError, match="leads from version 3 back to 3"):
        delta.model_validate(delta.model_dump() | {"base": 3})


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
        parse(Manifest, manifest_of(0, 0).to_bytes()[:-5], "runs/demo/manifests/0")


@pytest.mark.finding(11)
@pytest.mark.parametrize("field", ["created_at", "born"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 1e300])
def test_a_manifest_without_a_time_is_refused(field, value):
    """Its replicas would report that they took the version so many seconds later."""
    record = json.loads(manifest_of(1, 0).to_bytes()) | {field: value, "seal": ""}
    with pytest.raises(ProtocolError, match=f"not a valid Manifest: {field}"):
        parse(Manifest, json.dumps(record).encode(), "manifests/1")
