"""Reading a run from real buckets: anything that is not what was published is refused by name."""

import contextlib
import io
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from delta_weight_sync.checkpoint import read_bits, to_bits
from delta_weight_sync.cli import main
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import ProtocolError
from delta_weight_sync.store import open_bucket
from tests import forked
from tests.shared import killed_trainer
from tests.shared.written_run import write_run


@dataclass
class Result:
    """What a command did: its exit code, what it printed, and its complaint."""

    code: int
    output: str
    complaint: str


def command(*words: str) -> Result:
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            main(list(words))
    except SystemExit as stop:
        return Result(1, output.getvalue(), str(stop.code))
    return Result(0, output.getvalue(), "")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of five versions in a folder: its URL and the digest of each version."""
    url = (tmp_path_factory.mktemp("bucket")).as_uri()
    return url, write_run(url, tmp_path_factory.mktemp("base"), versions=5)


def test_log_lists_every_version(run):
    url, digests = run
    lines = command("log", url).output.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["4", "3", "2", "1", "0"]
    assert [line.split()[6] for line in lines] == digests[::-1]


def test_a_fault_is_one_line_and_a_failing_exit_code(run):
    words = [sys.executable, "-m", "delta_weight_sync", "show", run[0], "--version", "99"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("delta-weight-sync show: run 'test' in ")
    assert len(result.stderr.splitlines()) == 1


def test_show_describes_a_version(run):
    url, digests = run
    output = command("show", url, "--version", "3").output
    facts = json.loads(output[: output.index("\n}") + 2])
    manifest = RunReader(open_bucket(url), "test").at(3)
    assert facts["digest"] == digests[3]
    assert facts["changed"] == manifest.changed > 0
    assert facts["sparsity"] == pytest.approx(manifest.sparsity, abs=1e-6)
    assert facts["payload_bytes"] == manifest.deltas[-1].size
    assert "model.layers.0.self_attn.q_proj.weight" in output


def test_verify_proves_the_whole_run(run):
    url, digests = run
    output = command("verify", url).output
    assert all(f"version {v} ok, digest {digest}" in output for v, digest in enumerate(digests))
    assert output.endswith("all 5 versions verified\n")


@pytest.mark.parametrize("version", [0, 2, 4])
def test_checkout_writes_a_checkpoint_that_transformers_loads(run, tmp_path, version):
    url, digests = run
    result = command("checkout", url, "--version", str(version), "--out", str(tmp_path / "model"))
    assert result.code == 0, result.complaint
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded = {name: to_bits(parameter) for name, parameter in model.named_parameters()}
    assert to_hex(state_digest(loaded)) == digests[version]
    assert to_hex(state_digest(dict(read_bits(tmp_path / "model")))) == digests[version]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--run", "other"], "run 'other'"),
        (["--run", "../x"], "run name '../x'"),
        (["--version", "99"], "has not published version 99"),
    ],
)
def test_what_is_not_there_is_one_sentence(run, arguments, complaint):
    result = command("show", run[0], *arguments)
    assert result.code == 1
    assert complaint in result.complaint
    assert len(result.complaint.splitlines()) == 1


def test_an_empty_bucket_says_so(tmp_path):
    result = command("log", tmp_path.as_uri())
    assert result.code == 1
    assert "it holds none yet" in result.complaint


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
        RunReader(open_bucket(folder.as_uri()), "test").at()


def test_a_trainer_killed_while_it_uploads_leaves_the_last_version_usable(tmp_path):
    """-9 in the middle of each object and right after it: HEAD can be rebuilt, the next trainer goes on."""
    url, assets = (tmp_path / "bucket").as_uri(), tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    killed(url, assets, BASE - 1, True)
    reader = RunReader(open_bucket(url), killed_trainer.RUN)
    assert reader.head() is None
    killed(url, assets, BASE, True)
    newest = 0
    for last, whole in product(range(1, max(HEADS) + 1), (False, True)):
        killed(url, assets, last, whole)
        newest += sum(last > head or (last == head and whole) for head in HEADS)
        assert reader.at().version == newest, f"object {last}, whole: {whole}"
        result = command("verify", url)
        assert result.code == 0, result.complaint


BASE = 5  # objects of a run's first version: weights, config.json, run.json, manifest, HEAD
HEADS = (4, 7)  # a later trainer writes HEAD to take over, then delta, manifest and HEAD per version


def killed(url: str, assets: Path, last: int, whole: bool) -> None:
    trainer = forked.start(killed_trainer.publish, url, assets, last, whole)
    trainer.join(300)
    assert trainer.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("version", [None, 1])
def test_every_backend_gives_the_same_bits(bucket_url, tmp_path, version):
    digests = write_run(bucket_url, tmp_path / "base", versions=3)
    reader = RunReader(open_bucket(bucket_url), "test")
    state = reader.checkout(reader.at(version), tmp_path / "out")
    assert to_hex(state_digest(state)) == digests[-1 if version is None else version]
