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
from tests.support.published_run import write_run

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


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_reader_installs_on_every_supported_python(version, wheel, tmp_path):
    """In a new environment with only what the wheel asks for: verify a run that this Python published."""
    python = shutil.which(f"python{version}")
    if not python or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no python{version} on the PATH")
    digests = write_run(f"file://{tmp_path / 'bucket'}", tmp_path / "base", versions=3)
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([tmp_path / "venv/bin/pip", "install", "--quiet", wheel], check=True)
    command = [tmp_path / "venv/bin/delta-weight-sync", "verify", f"file://{tmp_path / 'bucket'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(digest in done.stdout for digest in digests), done.stdout
