"""A release of another package is judged by what is in it: used, used with less, or refused with the cure."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from delta_weight_sync import compat
from delta_weight_sync.compat import Feature, Package, Probe
from delta_weight_sync.errors import CompatibilityError
from delta_weight_sync.store import open_bucket
from delta_weight_sync.trl import hooks as trl_hooks
from delta_weight_sync.vllm import PAUSE, commits_between_steps, hooks
from tests.cli.command import command

LAB = Package(("lab-gpu", "lab"), tested=("1.0", "1.1", "1.2"), extra="lab")
SOURCE = """
import math

class Base:
    def __init__(self):
        self.queue = []

class Core(Base):
    label: str

    def step(self, tokens, *, limit=1):
        return self.finish(tokens)

def pack(layer, remove):
    "Packs."
"""


def _pack(probe: Probe) -> None:
    probe.exactly("lab.core", "pack", "layer", "remove")


def _step(probe: Probe) -> None:
    probe.attributes("lab.core", "Core", "queue", "label")
    probe.accepts("lab.core", "Core.step", "tokens", "limit")
    probe.calls("lab.core", "Core.step", "finish")
    probe.find("lab.core", "Core.step")


PACK = Feature(LAB, "live weights", _pack)
STEP = Feature(LAB, "fast steps", _step, without="steps are slow", since="1.2")
ALL = (PACK, STEP)


@pytest.fixture(autouse=True)
def nothing_is_cached(monkeypatch):
    for name in ("installed", "_missing"):
        monkeypatch.setattr(compat, name, getattr(compat, name).__wrapped__)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Installs a release of a package, in which some text is replaced."""

    def install(version: str, *changes: tuple[str, str]) -> Path:
        source = SOURCE
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        info = tmp_path / f"lab-{version}.dist-info"
        for file, text in {
            tmp_path / "lab" / "__init__.py": "",
            tmp_path / "lab" / "core.py": source,
            info / "METADATA": f"Metadata-Version: 2.1\nName: lab\nVersion: {version}\n",
        }.items():
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        return tmp_path

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for name in ("lab", "lab.core"):
        sys.modules.pop(name, None)


def test_a_release_that_was_tested_starts_silently(lab, caplog):
    lab("1.2.3")
    compat.require(ALL, STEP)
    assert STEP.works()
    assert not caplog.records


def test_a_package_that_is_not_installed_is_an_error():
    with pytest.raises(CompatibilityError, match=r"^lab-gpu is not installed: pip install '\.\[lab\]'"):
        compat.require(ALL)


def test_an_unknown_release_with_all_code_starts_with_one_warning(lab, caplog, monkeypatch):
    lab("2.0.1")
    compat.require(ALL)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    sentence = "lab 2.0.1 was not tested with this library: pip install 'lab==1.2.*'"
    assert record.getMessage().startswith(sentence)
    monkeypatch.setenv(compat.STRICT, "1")
    with pytest.raises(CompatibilityError, match=re.escape(sentence)):
        compat.require(ALL)


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("self.queue", "self.waiting", "Core.queue in lab.core"),
        ("self.queue", "other.queue", "Core.queue in lab.core"),
        ("label: str", "tag: str", "Core.label in lab.core"),
        ("def step(", "def go(", "Core.step in lab.core"),
        ("limit", "most", "Core.step with tokens limit in lab.core"),
        ("self.finish(", "self.end(", "Core.step with finish in lab.core"),
        ("class Core", "class Engine", "Core in lab.core"),
        (
            "def step(self, tokens, *, limit=1):",
            "step = 5\n    def go(self, tokens):",
            "Core.step with tokens",
        ),
    ],
)
def test_what_changed_for_an_optional_feature_switches_it_off_and_says_so(
    lab, caplog, monkeypatch, old, new, missing
):
    lab("1.2", (old, new))
    compat.require(ALL)
    assert not STEP.works()
    assert PACK.works()
    (record,) = caplog.records
    assert f"lab 1.2 has no {missing}" in record.getMessage()
    assert "needed for fast steps: pip install 'lab==1.2.*'; until then steps are slow" in record.getMessage()
    with pytest.raises(CompatibilityError, match="needed for fast steps"):
        compat.require(ALL, STEP)
    monkeypatch.setenv(compat.STRICT, "1")
    with pytest.raises(CompatibilityError, match="needed for fast steps"):
        compat.require(ALL)


@pytest.mark.parametrize("new", ["pack(layer)", "pack(remove, layer)", "pack(layer, remove, more=1)"])
def test_what_changed_for_a_needed_feature_is_an_error_with_the_nearest_release(lab, new):
    lab("1.0", ("pack(layer, remove)", new))
    sentence = (
        "lab 1.0 has no pack(layer, remove) in lab.core, needed for live weights: pip install 'lab==1.1.*'"
    )
    with pytest.raises(CompatibilityError, match=f"^{re.escape(sentence)}$"):
        compat.require(ALL)


def test_a_release_that_cannot_be_imported_is_an_error_with_the_reason(lab):
    lab("1.2", ("import math", "raise OSError('no libcudart.so')"))
    reason = r"has no module lab\.core that can be imported \(OSError: no libcudart\.so\), needed for"
    with pytest.raises(CompatibilityError, match=reason):
        compat.require(ALL)


def test_a_tested_release_that_never_had_a_feature_is_silent(lab, caplog):
    lab("1.1", ("limit", "most"))
    compat.require(ALL)
    assert not STEP.works()
    assert not caplog.records
    assert "lab==1.2.*" in STEP.problem(), "1.1 cannot be the cure"


def test_a_feature_of_cpu_builds_is_not_asked_of_another_build(lab):
    lab("1.2", ("pack(", "fold("))
    on_cpu = Feature(LAB, "live weights on a CPU", _pack, only_cpu=True)
    compat.require((on_cpu,))
    assert not on_cpu.works()


def lacks(monkeypatch: pytest.MonkeyPatch, *features: Feature) -> None:
    monkeypatch.setattr(compat, "_missing", lambda feature: ("this",) if feature in features else ())


def test_a_vllm_that_takes_nothing_between_two_steps_is_paused(monkeypatch):
    lacks(monkeypatch)
    assert commits_between_steps()
    monkeypatch.setenv(PAUSE, "1")
    assert not commits_between_steps(), "the owner prefers vLLM's own calls"
    monkeypatch.delenv(PAUSE)
    lacks(monkeypatch, hooks.IN_STEP)
    assert not commits_between_steps()


def test_a_vllm_that_takes_no_commit_at_all_is_refused(monkeypatch):
    lacks(monkeypatch, hooks.IN_STEP, hooks.PAUSED)
    with pytest.raises(CompatibilityError, match=r"has no this, needed for commits while vLLM is paused"):
        commits_between_steps()


def test_a_huggingface_hub_without_a_private_name_is_one_sentence(monkeypatch):
    monkeypatch.delattr("huggingface_hub.utils._xet.refresh_xet_connection_info")
    monkeypatch.delitem(sys.modules, "delta_weight_sync.store.hub", raising=False)
    sentence = (
        r"huggingface_hub \S+ has no refresh_xet_connection_info in huggingface_hub\.utils\._xet, "
        r"needed for buckets on the Hub: pip install 'huggingface_hub==\d+\.\d+\.\*'"
    )
    with pytest.raises(CompatibilityError, match=f"^{sentence}$"):
        open_bucket("hf://buckets/me/wordle")
    said = command("verify", "hf://buckets/me/wordle#first")
    assert said.code == 1
    assert re.search(sentence, said.complaint)
    assert "Traceback" not in said.complaint


def test_the_doctor_tells_features_that_are_off_from_errors(monkeypatch):
    lacks(monkeypatch, hooks.LABELS, trl_hooks.TRANSFER)
    found = command("doctor")
    assert "  off      the version of each token: an answer is labelled as a whole" in found.output
    assert "           missing this\n" in found.output
    assert "; or apply the patch upstream/vllm/0002\n" in found.output
    assert "  ok       commits between two steps\n" in found.output
    assert "  error    `BucketWeightTransfer`\n" in found.output
    assert found.code == 1, "TRL cannot be used"
    lacks(monkeypatch, hooks.LABELS)
    assert command("doctor").code == 0, "what is off does not make vLLM unusable"


def doctor(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that has not patched anything."""
    call = [sys.executable, "-m", "delta_weight_sync", "doctor", *map(str, words)]
    return subprocess.run(call, capture_output=True, text=True)


@pytest.mark.live
def test_the_releases_of_this_environment_have_all_that_the_library_needs():
    found = doctor()
    assert re.search(r"ok       huggingface_hub \d", found.stdout)
    for feature in (*hooks.FEATURES, *trl_hooks.FEATURES):
        assert f"  ok       {feature.what}\n" in found.stdout, found.stdout
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_doctor_examines_a_release_in_a_folder(tmp_path):
    package = tmp_path / "trl"
    info = tmp_path / "trl-2.0.0.dist-info"
    package.mkdir()
    (package / "__init__.py").touch()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 2.0.0\n")
    found = doctor("--site", tmp_path)
    assert "trl 2.0.0 was not tested with this library\n" in found.stdout
    assert "  error    `BucketWeightTransfer`\n" in found.stdout
    assert "missing module trl.experimental.async_grpo.async_grpo_trainer" in found.stdout
    assert "commits between two steps" not in found.stdout, "the folder holds no vLLM"
    assert found.returncode == 1
