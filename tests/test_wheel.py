"""What `pip install delta-weight-sync` gives: the library alone, which is loaded from anywhere."""

import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import delta_weight_sync

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[1]
INFO = f"delta_weight_sync-{delta_weight_sync.__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, next to the sources' archive; built from a copy: setuptools leaves files there."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    left_out = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for name in ("shared", "trainer", "inference_space", "env_space"):
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    build = f"import setuptools.build_meta as build; build.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def inside(wheel: Path, name: str) -> str:
    return zipfile.ZipFile(wheel).read(f"{INFO}/{name}").decode()


def test_it_holds_the_library_only(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"delta_weight_sync", INFO}
    assert {f"delta_weight_sync/{name}" for name in ("py.typed", "sizes.json")} <= {*names}
    shared = ROOT / "shared"
    sources = {str(path.relative_to(shared)) for path in (shared / "delta_weight_sync").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_an_index_would_take_both_files(wheel):
    files = [str(path) for path in wheel.parent.iterdir()]
    assert len(files) == 2
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True)
    assert done.returncode == 0, done.stdout


def test_a_wheel_of_the_archive_is_the_same(wheel, tmp_path):
    (archive,) = wheel.parent.glob("*.tar.gz")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(archive))
    contents = [zipfile.ZipFile(path) for path in (wheel, tmp_path / wheel.name)]
    there, here = ({info.filename: info.CRC for info in content.infolist()} for content in contents)
    assert there == here


def test_the_library_caps_no_version_but_one_that_is_known_not_to_fit(wheel):
    """The exact ones are in the Spaces' locks: a cap here would keep others from combining packages."""
    needs = map(Requirement, Parser().parsestr(inside(wheel, "METADATA")).get_all("Requires-Dist", []))
    clauses = [(need.name, clause) for need in needs for clause in need.specifier]
    assert [f"{name}{clause}" for name, clause in clauses if clause.operator != ">="] == ["trl<1.18"]


def test_the_changelog_begins_with_this_version():
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == delta_weight_sync.__version__


def test_its_metadata_says_what_each_use_needs(wheel):
    metadata = Parser().parsestr(inside(wheel, "METADATA"))
    points = ConfigParser()
    points.read_string(inside(wheel, "entry_points.txt"))
    extras = {"torch", "trl", "vllm", "sglang", "serve", "s3", "wandb", "trackio", "tensorboard", "dashboard"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    core = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert not [need for need in core if need.startswith(("torch", "trl", "vllm", "sglang", "transformers"))]
    assert list(points["console_scripts"]) == ["delta-weight-sync"]
    assert "vllm.general_plugins" in points
    assert "sglang.srt.plugins" in points


def test_it_is_imported_from_anywhere(wheel, tmp_path):
    """With nothing of the checkout in sight: an isolated Python, the wheel, and what it needs."""
    pip("install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel))
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
import delta_weight_sync
assert delta_weight_sync.__file__.startswith({str(tmp_path)!r}), delta_weight_sync.__file__
for name in delta_weight_sync.__all__:
    getattr(delta_weight_sync, name)
assert not {{"trl", "vllm"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True)
