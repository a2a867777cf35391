"""What a Space tells vLLM without being asked, and that its owner has the last word."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delta_weight_sync import gpu_build
from inference_space.embedded_vllm import EmbeddedVllm
from inference_space.settings import Settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM imports parts of torch that are deprecated
    import vllm.entrypoints.launchers.cli_args  # noqa: F401

pytestmark = pytest.mark.live  # vLLM's own parser


def arguments(vllm_args: str = "") -> Any:
    settings = Settings(bucket="file:///nowhere", run="r", vllm_args=vllm_args)
    return EmbeddedVllm._arguments(SimpleNamespace(_settings=settings), Path("checkpoint"))


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_build, "installed", lambda: True)


@pytest.mark.usefixtures("_gpu")
def test_on_a_gpu_experts_stay_in_the_order_in_which_they_are_loaded():
    assert arguments().moe_backend == "triton"
    assert arguments("--moe-backend flashinfer_cutlass").moe_backend == "flashinfer_cutlass"


def test_on_a_cpu_vllm_chooses():
    assert arguments().moe_backend == "auto"
    assert arguments().enforce_eager
