"""What `pip install delta-weight-sync` gives: the library alone, which is loaded from anywhere."""

import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest

import delta_weight_sync

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what belongs to it, in a folder of its own: setuptools leaves things beside its sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("shared", "trainer", "inference_space", "env_space", "examples"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (wheel,) = out.glob("*.whl")
    return wheel


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_holds_the_library_only(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"delta_weight_sync-{delta_weight_sync.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"delta_weight_sync", info}
    assert "delta_weight_sync/py.typed" in names
    sources = {
        str(path.relative_to(ROOT / "shared"))
        for path in (ROOT / "shared" / "delta_weight_sync").rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == sources


def test_its_metadata_says_what_each_use_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    info = f"delta_weight_sync-{delta_weight_sync.__version__}.dist-info"
    metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert set(metadata.get_all("Provides-Extra", [])) == {"torch", "trl", "vllm", "s3", "dashboard"}
    core = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert not [need for need in core if need.startswith(("torch", "trl", "vllm", "transformers"))]
    points = ConfigParser()
    points.read_string(archive.read(f"{info}/entry_points.txt").decode())
    assert list(points["console_scripts"]) == ["delta-weight-sync"]
    assert "vllm.general_plugins" in points


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
