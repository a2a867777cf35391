"""The public names of the library, how it writes times, and what an installation without an extra says."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import delta_weight_sync
from delta_weight_sync.util import time_text

ROOT = Path(__file__).parents[2]


def test_every_public_name_exists():
    for name in delta_weight_sync.__all__:
        assert getattr(delta_weight_sync, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'publisher_of_old'"):
        delta_weight_sync.publisher_of_old  # noqa: B018


def test_every_error_has_the_root_a_builtin_and_a_kind():
    builtins = (RuntimeError, ValueError, LookupError, FileNotFoundError, ImportError)
    for name in delta_weight_sync.__all__:
        if name.endswith("Error") and name != "DeltaWeightSyncError":
            error = getattr(delta_weight_sync, name)
            assert issubclass(error, delta_weight_sync.DeltaWeightSyncError)
            assert issubclass(error, builtins)
    assert delta_weight_sync.ObjectMissingError("x").kind == "object-missing"
    assert delta_weight_sync.FolderError("x").kind == "config", "its base's"


def test_naming_the_package_loads_neither_torch_nor_a_backend():
    heavy = "{'torch', 'trl', 'vllm', 'transformers', 'numba', 'numpy'}"
    code = f"import sys, delta_weight_sync as d; assert not {heavy} & set(sys.modules); print(d.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == delta_weight_sync.__version__


@pytest.mark.parametrize(
    ("missing", "statement", "extra"),
    [
        ("torch", "from delta_weight_sync import Publisher", "torch"),
        ("torch", "from delta_weight_sync import BucketWeightTransfer", "trl"),
        ("obstore", "from delta_weight_sync import open_bucket; open_bucket('s3://name')", "s3"),
    ],
)
def test_a_missing_package_names_the_extra(missing, statement, extra):
    code = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
try:
    {statement}
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"pip install '.[{extra}]'" in result.stdout, result.stderr


def test_a_time_has_a_unit_that_suits_it():
    texts = {0.0123: "12.3 ms", 0.9996: "1 s", 150: "2.5 min", 7560: "2.1 h", 4e6: "1111 h"}
    assert {seconds: time_text(seconds) for seconds in texts} == texts


def test_the_import_contract_names_every_private_module():
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (contract,) = [each for each in contracts if "private" in each["name"]]
    modules = (ROOT / "shared").glob("delta_weight_sync/**/_[a-z]*.py")
    named = [".".join(path.relative_to(ROOT / "shared").with_suffix("").parts) for path in modules]
    assert sorted(named) == sorted(contract["forbidden_modules"])
