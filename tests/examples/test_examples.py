"""The examples run as they stand, and what they publish is what anybody can rebuild."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from delta_weight_sync.reader import RunReader, open_run
from delta_weight_sync.runlog import RunLogReader, StepEvent
from delta_weight_sync.store import open_bucket
from tests.live.replica import served

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples"
QUIET = {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
ALONE = QUIET | {"PATH": os.environ["PATH"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small policy in it, far from the checkout."""
    place = tmp_path_factory.mktemp("place")
    shutil.copytree(ROOT / "trainer" / "policies" / "wordle-tiny", place / "policy")
    return place


def run(place: Path, *words: str) -> None:
    """A command of `place`, which knows of the checkout only what is installed."""
    done = subprocess.run(words, cwd=place, env=ALONE, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


def rebuilt(reader: RunReader, folder: Path) -> list[tuple[int, int]]:
    """Version and step of all, oldest first; each was proven by its digest."""
    manifests = sorted(reader.versions(), key=lambda manifest: manifest.version)
    for manifest in manifests:
        reader.checkout(manifest, folder / str(manifest.version))
    return [(manifest.version, manifest.sync) for manifest in manifests]


@pytest.mark.full
def test_an_own_loop_publishes_a_version_per_step_and_goes_on_when_it_is_started_again(place, tmp_path):
    """In three lives it ends with the weights that it ends with in one."""
    main = runpy.run_path(str(EXAMPLES / "own_loop.py"))["main"]
    newest = {}
    for name, lives in (("one", (5,)), ("three", (2, 3, 5))):
        reader = open_run(f"{(tmp_path / name).as_uri()}#own")
        for steps in lives:
            main(str(place / "policy"), f"{(tmp_path / name).as_uri()}#own", steps)
        newest[name] = reader.manifest()
        versions = rebuilt(reader, tmp_path / f"{name}-out")
        assert (versions[0], versions[-1][1]) == ((0, 0), 5), "steps may share a version"
    assert newest["three"].digest == newest["one"].digest
    assert 0 < newest["one"].changed < newest["one"].total
    files = tmp_path / "one-out" / str(newest["one"].version)
    config = json.loads((files / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("qwen3", "bfloat16")
    tokenizer = place / "policy" / "tokenizer.json"
    assert (files / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


@pytest.mark.full
def test_the_minimal_script_holds_the_same_bits_at_both_ends(place, tmp_path, capsys):
    url = f"{(tmp_path / 'bucket').as_uri()}#minimal"
    runpy.run_path(str(EXAMPLES / "minimal.py"))["main"](str(place / "policy"), url)
    printed = re.findall(
        r"^version (\d+): (\d+) of \d+ weights, \d+ bytes, (\w{16})$", capsys.readouterr().out, re.M
    )
    manifests = sorted(open_run(url).versions(), key=lambda manifest: manifest.version)
    assert [(int(version), digest) for version, _, digest in printed] == [
        (m.version, m.digest) for m in manifests
    ]
    assert len(manifests) == 6
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) <= 60


@pytest.mark.long
def test_the_same_loop_runs_under_torchrun(place, tmp_path):
    """Each rank with its own shards; then one process resumes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    url = f"{(tmp_path / 'bucket').as_uri()}#run"
    run(place, *torchrun, str(EXAMPLES / "own_loop.py"), "policy", url, "3")
    run(place, sys.executable, str(EXAMPLES / "own_loop.py"), "policy", url, "5")
    assert rebuilt(open_run(url), tmp_path / "rebuilt")[-1][1] == 5


@pytest.mark.live
def test_a_trl_script_and_a_vllm_meet_in_the_bucket_only(place, tmp_path):
    """TRL's own trainer and rollout worker, and vLLM's own server with the plugin."""
    (tmp_path / "bucket").mkdir()
    url = f"{(tmp_path / 'bucket').as_uri()}#trl"
    options = {"max-model-len": 256, "logprobs-mode": "processed_logprobs"}
    with served(place / "policy", url, tmp_path, **options) as vllm:
        run(place, sys.executable, str(EXAMPLES / "trl_script.py"), "policy", url, vllm.url, "6")
        newest = open_run(url).manifest()
        assert vllm.wait_for(newest.version)["digest"] == newest.digest
    log = (tmp_path / "vllm.log").read_text()
    assert re.search(r"INFO .* replica \S+: follows file://.*#trl\n", log), "vLLM's log names what it follows"
    assert re.search(r"INFO .* replica \S+: serves version \d+, digest", log)
    assert newest.sync == 7, "the base, and a version of each of six steps"
    logged = RunLogReader(open_bucket((tmp_path / "bucket").as_uri()), "trl").poll()
    steps = [event for event in logged if isinstance(event, StepEvent) and "ratio" in event.metrics]
    assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6], "TRL's metrics are in the run's log"
    assert newest.changed > 0
