"""The Space's default vLLM arguments, which its owner can override."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delta_weight_sync import gpu_build
from delta_weight_sync.signing import PUBLIC_KEY, new_pair
from inference_space.settings import Settings
from inference_space.vllm_server import VllmServer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM imports parts of torch that are deprecated
    import vllm.entrypoints.launchers.cli_args  # noqa: F401

pytestmark = pytest.mark.live  # vLLM's own parser


def arguments(vllm_args: str = "") -> Any:
    settings = Settings(bucket="file:///nowhere", run="r", vllm_args=vllm_args)
    return VllmServer._arguments(SimpleNamespace(_settings=settings), Path("checkpoint"))


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_build, "is_installed", lambda: True)


@pytest.mark.usefixtures("_gpu")
def test_on_a_gpu_experts_stay_in_the_order_in_which_they_are_loaded():
    assert arguments().moe_backend == "triton"
    assert arguments("--moe-backend flashinfer_cutlass").moe_backend == "flashinfer_cutlass"


def test_a_chat_template_of_an_unsigned_bucket_is_not_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(PUBLIC_KEY, raising=False)
    assert "raise_exception" in arguments().chat_template
    assert arguments("--chat-template {{messages}}").chat_template == "{{messages}}"
    monkeypatch.setenv(PUBLIC_KEY, new_pair()[PUBLIC_KEY])
    assert arguments().chat_template is None


def test_on_a_cpu_vllm_chooses():
    assert arguments().moe_backend == "auto"
    assert arguments().enforce_eager
