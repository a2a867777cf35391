"""The public names of the library, and what an installation without an extra says."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import delta_weight_sync

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", delta_weight_sync.__all__)
def test_every_public_name_exists(name):
    assert getattr(delta_weight_sync, name) is not None


@pytest.mark.parametrize(
    ("missing", "statement", "extra"),
    [
        ("torch", "from delta_weight_sync import Publisher", "torch"),
        ("torch", "from delta_weight_sync import BucketWeightTransfer", "trl"),
        ("s3fs", "from delta_weight_sync import open_bucket; open_bucket('s3://name')", "s3"),
    ],
)
def test_a_missing_package_names_the_extra(missing, statement, extra):
    code = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ({missing!r}, "fsspec" if {missing!r} == "s3fs" else None):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
try:
    {statement}
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"pip install 'delta-weight-sync[{extra}]'" in result.stdout, result.stderr


def test_the_import_contract_names_every_private_module():
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (contract,) = [each for each in contracts if "private" in each["name"]]
    modules = (ROOT / "shared").glob("delta_weight_sync/**/_[a-z]*.py")
    named = [".".join(path.relative_to(ROOT / "shared").with_suffix("").parts) for path in modules]
    assert sorted(named) == sorted(contract["forbidden_modules"])
