"""vLLM is given the settings of its build, and a machine that cannot run it is named in one sentence."""

import logging
import os

import pytest

from delta_weight_sync import gpu_build
from delta_weight_sync.errors import EngineError
from inference_space.settings import Settings
from inference_space.vllm_server import VllmServer


@pytest.fixture
def vllm(tmp_path) -> VllmServer:
    return VllmServer(Settings(bucket="file:///b", run="r", folder=str(tmp_path)))


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM imports parts of torch that are deprecated
@pytest.mark.parametrize("for_gpus", [True, False], ids=["gpu", "cpu"])
def test_a_build_for_gpus_runs_with_cuda_graphs(vllm, tmp_path, monkeypatch, for_gpus):
    monkeypatch.setattr(gpu_build, "is_installed", lambda: for_gpus)
    arguments = vllm._arguments(tmp_path)
    assert arguments.enforce_eager is not for_gpus
    assert (arguments.kv_cache_memory_bytes is None) is for_gpus, "on a GPU vLLM measures what is left"


@pytest.mark.parametrize(
    ("for_gpus", "said", "then"), [(False, "", "1"), (False, "0", "0"), (True, "", None)]
)
def test_on_a_cpu_no_answer_waits_for_a_compiler_unless_its_owner_wants_that(
    tmp_path, monkeypatch, for_gpus, said, then
):
    monkeypatch.setattr(gpu_build, "is_installed", lambda: for_gpus)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", said)
    if not said:
        monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    VllmServer(Settings(bucket="file:///b", run="r", folder=str(tmp_path)))
    assert os.environ.get("TORCH_COMPILE_DISABLE") == then


def test_a_gpu_that_is_missing_is_named_before_vllm_starts(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_build, "problem", lambda: "there is no GPU; attach one")
    with pytest.raises(EngineError, match=r"^vLLM cannot start: there is no GPU; attach one$"):
        vllm.start(tmp_path)


def test_what_may_be_lacking_later_is_a_warning(vllm, tmp_path, monkeypatch, caplog):
    def no_engine(*_):
        raise ValueError("none is wanted here")

    monkeypatch.setattr(gpu_build, "missing", lambda: ["there is no compiler; install gcc"])
    monkeypatch.setattr(vllm, "_arguments", no_engine)
    with caplog.at_level(logging.WARNING, "delta_weight_sync"), pytest.raises(EngineError, match="is wanted"):
        vllm.start(tmp_path)
    assert caplog.messages == ["there is no compiler; install gcc"]
