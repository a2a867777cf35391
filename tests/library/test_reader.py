"""Reading a run from real buckets: anything that is not what was published is refused by name."""

import signal
from itertools import product
from pathlib import Path

import pytest

from delta_weight_sync.errors import ProtocolError
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from tests import forked
from tests.cli.command import command
from tests.library import killed_trainer
from tests.support.published_run import write_run


def test_a_flipped_byte_in_any_object_is_refused_by_name(tmp_path):
    folder = tmp_path / "bucket"
    folder.mkdir()
    write_run(folder.as_uri(), tmp_path / "base", versions=3)
    objects = [p for p in folder.rglob("*") if p.is_file() and "/log/" not in str(p) and p.name != "run.json"]
    assert len(objects) >= 9
    for path in objects:
        original = path.read_bytes()
        path.write_bytes(bytes([*original[:-9], original[-9] ^ 1, *original[-8:]]))
        result = command("verify", folder.as_uri())
        path.write_bytes(original)
        assert result.code == 1, path
        assert path.name in result.complaint, f"{path.name} is not named: {result.complaint}"
        assert len(result.complaint.splitlines()) == 1
    assert command("verify", folder.as_uri()).code == 0


def test_a_rolled_back_manifest_is_refused(tmp_path):
    """Version 1's manifest in the place of version 2's: valid JSON, but not what HEAD names."""
    folder = tmp_path / "bucket"
    folder.mkdir()
    write_run(folder.as_uri(), tmp_path / "base", versions=3)
    manifests = sorted((folder / "runs/test/manifests").iterdir())
    manifests[2].write_bytes(manifests[1].read_bytes())
    with pytest.raises(ProtocolError, match="00000002"):
        RunReader(open_bucket(folder.as_uri()), "test").require_intact()
    assert RunReader(open_bucket(folder.as_uri()), "test").manifest().version == 1, "the newest that is whole"


def test_a_trainer_killed_while_it_uploads_leaves_the_last_version_usable(tmp_path):
    """-9 in the middle of each object and right after it: HEAD can be rebuilt, the next trainer goes on."""
    url, assets = (tmp_path / "bucket").as_uri(), tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    early = (tmp_path / "early").as_uri()
    killed(early, assets, BASE - 1, True)
    assert RunReader(open_bucket(early), killed_trainer.RUN).newest() is None
    killed(url, assets, BASE, True)
    reader = RunReader(open_bucket(url), killed_trainer.RUN)
    newest, decided = 0, 0  # the second: its manifest is whole, and HEAD did not move any more
    for last, whole in product(range(1, max(HEADS) + 1), (False, True)):
        killed(url, assets, last, whole)
        written = last if whole else last - 1
        newest += (decided if written >= CLAIM else 0) + sum(written >= head for head in HEADS)
        decided = sum(written == head - 1 for head in HEADS) if written >= CLAIM else decided
        assert reader.manifest().version == newest, f"object {last}, whole: {whole}"
        result = command("verify", url)
        assert result.code == 0, result.complaint


BASE = 6  # objects of a run's first version: a claim, weights, config.json, run.json, manifest, HEAD
CLAIM = 1  # a later trainer takes over with a HEAD of its own
HEADS = (4, 7)  # then come delta, manifest and HEAD per version


def killed(url: str, assets: Path, last: int, whole: bool) -> None:
    trainer = forked.start(killed_trainer.publish, url, assets, last, whole)
    trainer.join(300)
    assert trainer.exitcode == -signal.SIGKILL
