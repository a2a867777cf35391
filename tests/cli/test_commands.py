"""`delta-weight-sync log | show | verify | checkout | bisect`: what they say, and how they end."""

import json
import math
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from delta_weight_sync import badge
from delta_weight_sync.checkpoint import WEIGHTS, read_bits, to_bits
from delta_weight_sync.cli import COMMANDS
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.reader import RunReader, open_run
from delta_weight_sync.records import Head, Manifest, Writer, reference
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, new_pair
from delta_weight_sync.store import open_bucket
from tests.cli.command import Result, command
from tests.support.alive import Alive
from tests.support.published_run import write_run
from tests.support.real_run import Drifting


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of five versions in a folder: its URL and the digest of each version."""
    url = tmp_path_factory.mktemp("bucket").as_uri()
    return url, write_run(url, tmp_path_factory.mktemp("base"), versions=5)


def test_log_lists_every_version(finished):
    url, digests = finished
    lines = command("log", url).output.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["4", "3", "2", "1", "0"]
    assert [line.split()[-1 - line.endswith("yes")] for line in lines] == digests[::-1]
    assert lines[-1].split()[6] == "all", "version 0 is a whole checkpoint"
    assert [line.endswith("yes") for line in lines] == [False] * 4 + [True], "of version 0"
    rows = [json.loads(line) for line in command("log", url, "--json", "-n", 2).output.splitlines()]
    assert [(row["version"], row["syncs"], row["digest"]) for row in rows] == [
        (4, "5", digests[4]),
        (3, "4", digests[3]),
    ]


def test_a_badge_says_verified_of_what_was_rebuilt(finished):
    url, _ = finished
    done = command("badge", url)
    assert (done.code, done.complaint) == (0, "")
    assert ElementTree.fromstring(done.output).attrib["aria-label"] == "test: v4 · verified"


def test_a_badge_says_signed_if_a_trusted_key_signed(tmp_path, monkeypatch):
    monkeypatch.setenv(SIGNING_KEY, new_pair()[SIGNING_KEY])
    write_run((tmp_path / "bucket").as_uri(), tmp_path / "base", versions=1)
    assert "v0 · verified · signed" in command("badge", (tmp_path / "bucket").as_uri()).output


def test_there_is_no_badge_of_a_damaged_version(finished, tmp_path):
    shutil.copytree(unquote(urlsplit(finished[0]).path), tmp_path / "bucket")
    (weights,) = tmp_path.glob("bucket/runs/test/anchors/*/*.safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    done = command("badge", (tmp_path / "bucket").as_uri())
    assert (done.code, done.output) == (1, "")
    assert weights.name in done.complaint


def test_names_on_a_badge_are_text():
    drawn = badge.draw("<script>&\"'\x1b", "x" * 999, "good")
    root = ElementTree.fromstring(drawn)
    left, right = root.iter("{http://www.w3.org/2000/svg}text")
    assert left.text == "<script>&\"'\\x1b"
    assert right.text == "x" * 127 + "…"
    assert "<script" not in drawn


def test_runs_lists_the_runs_of_a_bucket(finished):
    url, _ = finished
    open_bucket(url).put("runs/_old/notes", b"no run has such a name")
    (row,) = [json.loads(line) for line in command("runs", url, "--json").output.splitlines()]
    assert (row["run"], row["newest"]) == ("test", 4)
    assert command("runs", url).output.splitlines()[1].split()[-1] == "test"


def test_runs_goes_on_after_a_run_that_it_may_not_read(tmp_path, monkeypatch):
    url = (tmp_path / "bucket").as_uri()
    write_run(url, tmp_path / "base", versions=1, run="a-unsigned")
    keys = new_pair()
    monkeypatch.setenv(SIGNING_KEY, keys[SIGNING_KEY])
    write_run(url, tmp_path / "base", versions=2, run="b-signed")
    monkeypatch.delenv(SIGNING_KEY)
    monkeypatch.setenv(PUBLIC_KEY, keys[PUBLIC_KEY])
    done = command("runs", url)
    _, unsigned, signed, reason = done.output.splitlines()
    assert (done.code, unsigned.split()[-1], signed.split()[0]) == (0, "a-unsigned", "1")
    assert reason.startswith("a-unsigned is not read: ")
    first, second = (json.loads(line) for line in command("runs", url, "--json").output.splitlines())
    assert reason.endswith(first["problem"])
    assert second["newest"] == 1


@pytest.mark.finding("M9")
@pytest.mark.parametrize("words", ["log", "log --json", "log -n 30", "verify"])
def test_no_command_keeps_the_manifests_of_all_versions(broken, monkeypatch, words):
    name, *options = words.split()
    alive = Alive(monkeypatch)
    assert command(name, broken.url, *options).code == 0
    assert alive.read > 30
    assert alive.most < 8


@pytest.mark.finding("M9")
def test_log_reads_the_versions_that_it_lists(broken, monkeypatch):
    alive = Alive(monkeypatch)
    lines = command("log", broken.url, "-n", 3).output.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["40", "39", "38"]
    assert alive.read <= 3 + 2, "one more for the first sync of the last line"


@pytest.mark.finding("M13")
def test_a_jump_to_a_version_that_does_not_exist_is_one_sentence(tmp_path):
    run = Drifting(tmp_path / "bucket")
    run.steps(2)
    run.close()
    writer = Writer(run.newest.writer_term, run.newest.writer)
    place = {"key": run.reader.keys.jump(1, 1 << 32, writer), "base": 1, "version": 1 << 32}
    nowhere = run.newest.deltas[0].model_copy(update=place)
    forged = Manifest(**dict(run.newest) | {"jumps": (nowhere,), "seal": ""})
    key = run.reader.keys.manifest(forged.version, writer)
    head = Head(**forged.model_dump(include={*Head.model_fields} - {"seal"}), manifest=reference(key, forged))
    run.reader.bucket.put(key, forged.to_bytes())
    run.reader.bucket.put(run.reader.keys.head(writer), head.to_bytes())
    result = command("verify", run.url)
    assert result.code == 1
    assert "names a jump from version 1 to 4294967296, which the run does not have" in result.complaint
    assert len(result.complaint.splitlines()) == 1


def test_show_describes_a_version(finished):
    url, digests = finished
    output = command("show", url, "--version", "3").output
    facts = json.loads(command("show", url, "--version", "3", "--json").output)
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
    rows = [json.loads(line) for line in command("verify", url, "--json").output.splitlines()]
    assert [row["digest"] for row in rows] == digests


def test_verify_keeps_at_most_two_checkpoints_on_the_disk(finished, tmp_path, monkeypatch):
    """Although no version has a delta."""
    held = list[int]()
    checkout = RunReader.checkout

    def noted(*arguments):
        state = checkout(*arguments)
        held.append(len([*tmp_path.rglob("*.safetensors")]))
        return state

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(RunReader, "checkout", noted)
    monkeypatch.setattr(Manifest, "delta", ())
    assert command("verify", finished[0]).code == 0
    assert (len(held), max(held)) == (7, 2)


@pytest.mark.parametrize("words", [["checkout", "--out"], ["follow", "--once", "--into"]])
def test_a_full_disk_is_said_with_the_file_and_the_fix(finished, tmp_path, words):
    name, *options = words
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        done = command(name, finished[0], *options, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert done.code == 1
    assert done.complaint.startswith(f"delta-weight-sync {name}: cannot use {tmp_path}/model")
    assert "File too large; free space there, or choose another folder" in done.complaint


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


@pytest.mark.parametrize("words", ["log", "show", "verify", "gc --keep 1h"])
def test_an_empty_bucket_and_an_empty_run_say_so(tmp_path, words):
    (name, *options) = words.split()
    url = tmp_path.as_uri()
    assert "it holds none yet" in command(name, url, *options).complaint
    complaint = f"delta-weight-sync {name}: run 'x' in {url} has not published a first version\n"
    assert command(name, f"{url}#x", *options) == Result(1, "", complaint)


def test_a_folder_that_cannot_be_written_is_one_sentence(finished, tmp_path):
    (tmp_path / "file").touch()
    result = command("checkout", finished[0], "--out", tmp_path / "file" / "model")
    assert result.code == 1
    assert f"{tmp_path}/file/model is a file, or lies in one: name a folder" in result.complaint
    assert len(result.complaint.splitlines()) == 1


def test_checkout_replaces_a_checkout_if_told_to_and_never_another_model(finished, tmp_path):
    other, out = tmp_path / "other", tmp_path / "out"
    other.mkdir()
    save_file({"w": torch.ones(2).bfloat16()}, other / "model-00001-of-00001.safetensors")
    for force in ([], ["--force"]):
        result = command("checkout", finished[0], "--out", other, *force)
        names = [path.name for path in other.iterdir()]
        assert (result.code, names) == (1, ["model-00001-of-00001.safetensors"])
    assert "holds other files: name an empty folder, or a new one" in result.complaint
    assert command("checkout", finished[0], "--version", 1, "--out", out).code == 0
    before = (out / WEIGHTS).read_bytes()
    assert command("checkout", finished[0], "--out", out).code == 1
    assert (out / WEIGHTS).read_bytes() == before
    assert command("checkout", finished[0], "--out", out, "--force").code == 0
    assert (out / WEIGHTS).read_bytes() != before


def test_a_reader_that_has_seen_enough_is_no_fault(finished):
    words = f"{sys.executable} -m delta_weight_sync log {finished[0]} | true"
    shell = ["bash", "-o", "pipefail", "-c", words]
    result = subprocess.run(shell, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "heavy"), [("log", {"torch", "numba", "huggingface_hub"}), ("verify", {"torch"})]
)
def test_what_takes_seconds_to_import_is_not_waited_for(finished, name, heavy):
    """`verify` reads and writes checkpoints."""
    code = f"""
import sys
from delta_weight_sync.cli import main
main([{name!r}, {finished[0]!r}])
sys.exit(" and ".join(sorted({heavy} & set(sys.modules))) or 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name):
    result = command(name, "--help")
    assert result.code == 0
    assert COMMANDS[name][1:] in " ".join(result.output.split())


# versions after the first; where the fault is planted
VERSIONS = 40
BROKEN = 23
FAULT = torch.full((64,), 100.0).bfloat16().view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Drifting:
    """A run whose norm was overwritten at version `BROKEN`, and stays so."""
    run = Drifting(tmp_path_factory.mktemp("runs") / "bucket")
    for version in range(1, VERSIONS + 1):
        if version == BROKEN:
            run.weights["norm.weight"].fill_(100.0)
        run.step()
    run.close()
    return run


@pytest.fixture
def judge(tmp_path: Path) -> str:
    """A command that is 1 for a checkpoint with the planted fault, and notes what it was asked of."""
    script = tmp_path / "judge.py"
    script.write_text(
        "import pathlib, sys\n"
        f"with open({str(tmp_path / 'asked')!r}, 'a') as asked: asked.write(sys.argv[2] + ' ')\n"
        f"weights = pathlib.Path(sys.argv[1], {WEIGHTS!r}).read_bytes()\n"
        "assert pathlib.Path(sys.argv[1], 'config.json').exists()\n"
        f"sys.exit(int({FAULT!r} in weights))\n"
    )
    return f"{sys.executable} -S {script} {{path}} {{version}}"


def asked(tmp_path: Path) -> list[int]:
    return [int(version) for version in (tmp_path / "asked").read_text().split()]


@pytest.mark.parametrize(("ends", "judged"), [(["--good", "0", "--bad", VERSIONS], []), ([], [VERSIONS, 0])])
def test_the_planted_version_is_found_by_halving(broken, judge, tmp_path, ends, judged):
    """Ends that are not given are judged first."""
    result = command("bisect", broken.url, "--eval", judge, *ends)
    assert (result.code, result.complaint) == (0, "")
    assert f"version {BROKEN} is the first bad one" in result.output
    assert asked(tmp_path)[: len(judged)] == judged
    assert len(asked(tmp_path)) <= len(judged) + math.ceil(math.log2(VERSIONS))
    assert f"delta-weight-sync blame {broken.url}#drifting --version {BROKEN}" in result.output


def test_one_checkpoint_is_made_of_another_by_deltas(broken, judge):
    with mock.patch.object(RunReader, "_fetch", autospec=True, side_effect=RunReader._fetch) as fetch:
        command("bisect", broken.url, "--eval", judge, "--bad", VERSIONS)
    fetched = [call.args[1].key for call in fetch.call_args_list]
    anchors = [key for key in fetched if key.endswith(WEIGHTS)]
    assert len(anchors) == 1, "the good end's; all others follow from a good version"
    assert len(fetched) > len(anchors)


def test_a_version_that_cannot_be_judged_is_passed_over(broken, judge, tmp_path):
    middle = VERSIONS // 2
    skipping = f"test {{version}} = {middle} && exit 125; {judge}"
    result = command("bisect", broken.url, "--eval", skipping, "--good", 0, "--bad", VERSIONS)
    assert f"version {middle}: unknown" in result.output
    assert f"version {BROKEN} is the first bad one" in result.output
    assert middle not in asked(tmp_path)


@pytest.mark.parametrize(
    ("judge", "ends", "sentence"),
    [
        ("exit 125 # {path}", "--good 20 --bad 23", "is in the range 21 to 23: your command could not judge"),
        ("true {path}", "--good 9 --bad 9", "nothing lies between good 9 and bad 9: --bad must"),
        ("true {path}", "", "the newest version, 40, was not judged bad"),
        ("false {path}", "", "the oldest version, 0, was not judged good"),
        ("no-such-program {path}", "", "--eval could not be started (exit code 127)"),
        ("kill -9 $$ # {path}", "", "--eval returned exit code -9 for version 40; expected 0"),
        ("true", "", "use {path}, {version} or {digest} in it"),
        ("true {path}", "--bad 99", "has no version 99; its newest is version 40"),
    ],
)
def test_what_cannot_be_found_is_one_sentence(broken, judge, ends, sentence):
    result = command("bisect", broken.url, "--eval", judge, *ends.split())
    assert result.code == 1
    assert result.complaint.startswith("delta-weight-sync bisect: ")
    assert sentence in result.complaint
    assert len(result.complaint.splitlines()) == 1


def test_blame_shows_what_was_planted_first(broken):
    lines = command("blame", broken.url, "--version", BROKEN).output.splitlines()
    manifest = open_run(broken.url).manifest(BROKEN)
    assert lines[0].startswith(f"version {BROKEN} changed {manifest.changed:,} weights of {manifest.total:,}")
    first = lines[2].split()
    assert lines[2].endswith("norm.weight [64]")
    assert first[:3] == ["64", "100.000", "%"]
    assert [int(count) for count in first[3:9]] == [0, 0, 0, 0, 0, 64], "all moved far"
    assert sum(int(line.split()[0].replace(",", "")) for line in lines[2:]) == manifest.changed


def test_blame_of_what_no_delta_leads_to(broken):
    result = command("blame", broken.url, "--version", 0)
    assert (result.code, result.output) == (1, "")
    assert "published as a whole checkpoint, without a delta: name a later version" in result.complaint


def test_blame_reads_deltas_that_were_coded_against_the_old_weights(tmp_path):
    run = Drifting(tmp_path / "bucket", encoding="small")
    manifest = run.step()
    run.close()
    lines = command("blame", run.url).output.splitlines()
    assert sum(int(line.split()[0].replace(",", "")) for line in lines[2:]) == manifest.changed > 0
