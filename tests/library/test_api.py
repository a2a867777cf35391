"""The public names of the library, how it writes times, and what an installation without an extra says."""

import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import delta_weight_sync
from delta_weight_sync import errors
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


def test_every_error_survives_a_process_boundary():
    """In a pool of workers, an error that cannot be loaded hides its cause."""
    missing = delta_weight_sync.MissingExtraError(
        "x", "s3", ModuleNotFoundError("no obstore", name="obstore")
    )
    made = [
        missing,
        errors.SettingsError({"REPLICA_BUCKET": "name a bucket"}),
        errors.EngineError("vLLM refused", "route"),
    ]
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    made += [kind("a sentence") for kind in kinds if kind not in {type(error) for error in made}]
    for error in made:
        same = pickle.loads(pickle.dumps(error))
        assert (type(same), str(same), same.kind) == (type(error), str(error), error.kind)
    assert pickle.loads(pickle.dumps(made[1])).problems == {"REPLICA_BUCKET": "name a bucket"}


def test_an_editor_can_complete_the_arguments_of_publisher_and_transfer():
    names = [*inspect.signature(delta_weight_sync.Publisher).parameters]
    assert names[:3] == ["url", "base", "encoding"]
    assert "options" not in names
    transfer = inspect.signature(delta_weight_sync.BucketWeightTransfer).parameters
    # TRL saves its own checkpoints, and gathers the weights of the whole model itself.
    left_out = {"adapter", "state_minutes", "peers"}
    assert {*names} - {*transfer} == left_out
    for name in {*names} & {*transfer}:
        default = inspect.signature(delta_weight_sync.Publisher).parameters[name].default
        assert transfer[name].default == default, name


def test_what_one_holds_in_a_notebook_says_what_it_is(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    save_file({"w": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "base" / "model.safetensors")
    url = f"{(tmp_path / 'bucket').as_uri()}#first"
    with delta_weight_sync.Publisher(url, tmp_path / "base") as publisher:
        assert repr(publisher) == f"<Publisher of {url}: no version yet, sync 0>"
        publisher.publish({"w": torch.ones(3)})
        assert repr(publisher) == f"<Publisher of {url}: version 0, sync 1>"
    assert repr(delta_weight_sync.Run(url)) == f"<Run {url}>"


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
        ("obstore", "from delta_weight_sync import Run; Run('s3://name', 'first')", "s3"),
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
