"""`delta-weight-sync log | show | verify | checkout`: what they say, and how they end."""

import json
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from delta_weight_sync.checkpoint import read_bits, to_bits
from delta_weight_sync.cli import COMMANDS
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from tests.cli.command import Result, command
from tests.support.published_run import write_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of five versions in a folder: its URL and the digest of each version."""
    url = (tmp_path_factory.mktemp("bucket")).as_uri()
    return url, write_run(url, tmp_path_factory.mktemp("base"), versions=5)


def test_log_lists_every_version(finished):
    url, digests = finished
    lines = command("log", url).output.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["4", "3", "2", "1", "0"]
    assert [line.split()[6] for line in lines] == digests[::-1]


def test_show_describes_a_version(finished):
    url, digests = finished
    output = command("show", url, "--version", "3").output
    facts = json.loads(output[: output.index("\n}") + 2])
    manifest = RunReader(open_bucket(url), "test").manifest(3)
    assert facts["digest"] == digests[3]
    assert facts["changed"] == manifest.changed > 0
    assert facts["sparsity"] == pytest.approx(manifest.sparsity, abs=1e-6)
    assert facts["payload_bytes"] == manifest.deltas[-1].size
    assert "model.layers.0.self_attn.q_proj.weight" in output


def test_verify_proves_the_whole_run(finished):
    url, digests = finished
    output = command("verify", url).output
    assert all(f"version {v} ok, digest {digest}" in output for v, digest in enumerate(digests))
    assert output.endswith("all 5 versions verified\n")


@pytest.mark.parametrize("version", [0, 2, 4])
def test_checkout_writes_a_checkpoint_that_transformers_loads(finished, tmp_path, version):
    url, digests = finished
    result = command("checkout", url, "--version", version, "--out", tmp_path / "model")
    assert result.code == 0, result.complaint
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded = {name: to_bits(parameter) for name, parameter in model.named_parameters()}
    assert to_hex(state_digest(loaded)) == digests[version]
    assert to_hex(state_digest(dict(read_bits(tmp_path / "model")))) == digests[version]


def test_a_run_is_named_in_the_url_or_beside_it(finished):
    url, _ = finished
    alone = command("log", url)
    assert command("log", f"{url}#test") == command("log", url, "--run", "test") == alone


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--run", "other"], "run 'other'"),
        (["--run", "../x"], "run name '../x'"),
        (["--version", "99"], "has not published version 99"),
    ],
)
def test_what_is_not_there_is_one_sentence(finished, arguments, complaint):
    result = command("show", finished[0], *arguments)
    assert (result.code, result.output) == (1, "")
    assert result.complaint.startswith("delta-weight-sync show: ")
    assert complaint in result.complaint
    assert len(result.complaint.splitlines()) == 1


@pytest.mark.parametrize("name", ["log", "show", "verify"])
def test_an_empty_bucket_and_an_empty_run_say_so(tmp_path, name):
    assert "it holds none yet" in command(name, tmp_path.as_uri()).complaint
    assert command(name, f"{tmp_path.as_uri()}#x") == Result(
        1,
        "",
        f"delta-weight-sync {name}: run 'x' in {tmp_path.as_uri()} has not published a first version\n",
    )


def test_a_folder_that_cannot_be_written_is_one_sentence(finished, tmp_path):
    (tmp_path / "file").touch()
    result = command("checkout", finished[0], "--out", tmp_path / "file" / "model")
    assert result.code == 1
    assert "Not a directory" in result.complaint
    assert len(result.complaint.splitlines()) == 1


def test_a_reader_that_has_seen_enough_is_no_fault(finished):
    words = f"{sys.executable} -m delta_weight_sync log {finished[0]} | true"
    shell = ["bash", "-o", "pipefail", "-c", words]
    result = subprocess.run(shell, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_listing_versions_waits_for_neither_torch_nor_numba(finished):
    code = f"""
import sys
from delta_weight_sync.cli import main
main(["log", {finished[0]!r}])
sys.exit(" and ".join(sorted({{"torch", "numba", "huggingface_hub"}} & set(sys.modules))) or 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name):
    result = command(name, "--help")
    assert result.code == 0
    assert COMMANDS[name][1:] in " ".join(result.output.split())
