"""The Space's arguments for vLLM, which its owner can override, and machines that cannot run it."""

import logging
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import trainer.policies
from delta_weight_sync import gpu_build
from delta_weight_sync.errors import CompatibilityError, EngineError
from delta_weight_sync.signing import PUBLIC_KEY, new_pair
from inference_space.settings import Settings
from inference_space.vllm_server import VllmServer

POLICY = Path(trainer.policies.__file__).parent / "wordle-tiny"


@pytest.fixture
def vllm(tmp_path) -> VllmServer:
    return VllmServer(Settings(bucket="file:///b", run="r", folder=str(tmp_path)))


def arguments(vllm_args: str = "") -> Namespace:
    settings = Settings(bucket="file:///nowhere", run="r", vllm_args=vllm_args)
    return VllmServer._arguments(SimpleNamespace(_settings=settings), Path("checkpoint"))


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM imports parts of torch that are deprecated
class TestArguments:
    def test_on_a_gpu_cuda_graphs_run_and_experts_keep_their_order(self, monkeypatch):
        monkeypatch.setattr(gpu_build, "is_installed", lambda: True)
        given = arguments()
        assert (given.enforce_eager, given.moe_backend) == (False, "triton")
        assert given.kv_cache_memory_bytes is None, "on a GPU vLLM measures what is left"
        assert arguments("--moe-backend flashinfer_cutlass").moe_backend == "flashinfer_cutlass"

    def test_on_a_cpu_the_cache_has_a_size_and_vllm_chooses_the_kernels(self, monkeypatch):
        monkeypatch.setattr(gpu_build, "is_installed", lambda: False)
        given = arguments()
        assert (given.enforce_eager, given.moe_backend) == (True, "auto")
        assert given.kv_cache_memory_bytes is not None

    def test_a_chat_template_of_an_unsigned_bucket_is_not_run(self, monkeypatch):
        monkeypatch.delenv(PUBLIC_KEY, raising=False)
        assert "raise_exception" in Path(arguments().chat_template).read_text()
        assert arguments("--chat-template {{messages}}").chat_template == "{{messages}}"
        monkeypatch.setenv(PUBLIC_KEY, new_pair()[PUBLIC_KEY])
        assert arguments().chat_template is None

    @pytest.mark.parametrize(
        ("vllm_args", "quoted"),
        [
            ("--hf-tokn=geheimnis", True),  # the parser refuses it
            ("--hf-overrides '{\"a\": geheimnis}'", True),
            ("--api-key 'geheimnis", False),  # the shell's rules do
            ('--speculative-config \'{"method": "geheimnis"}\'', True),  # the engine's configuration does
        ],
    )
    def test_a_secret_in_arguments_that_vllm_refuses_is_only_in_the_log(
        self, vllm_args, quoted, vllm, tmp_path, monkeypatch
    ):
        log = mock.Mock()  # not caplog: vLLM loads the plugin, so that its logger takes the messages
        monkeypatch.setattr("inference_space.vllm_server.log", log)
        vllm._settings = Settings(bucket="file:///b", run="r", folder=str(tmp_path), vllm_args=vllm_args)
        with pytest.raises(EngineError) as refused:
            vllm.start(POLICY)
        said = "vLLM did not start with these REPLICA_VLLM_ARGS; the replica's log says why"
        assert str(refused.value) == said
        (call,) = log.error.call_args_list
        assert ("geheimnis" if quoted else "No closing quotation") in str(call)


def test_a_sentence_of_the_library_is_shown_with_any_arguments(vllm, tmp_path, monkeypatch):
    vllm._settings = Settings(bucket="file:///b", run="r", folder=str(tmp_path), vllm_args="--seed 1")
    monkeypatch.setattr(vllm, "_arguments", mock.Mock(side_effect=CompatibilityError("install vLLM 0.32")))
    with pytest.raises(EngineError, match=r"install vLLM 0\.32"):
        vllm.start(tmp_path)


@pytest.mark.parametrize(
    ("for_gpus", "said", "then"), [(False, "", "1"), (False, "0", "0"), (True, "", None)]
)
def test_on_a_cpu_no_answer_waits_for_a_compiler_by_default(tmp_path, monkeypatch, for_gpus, said, then):
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
    no_engine = mock.Mock(side_effect=ValueError("none is wanted here"))
    monkeypatch.setattr(gpu_build, "missing", lambda: ["there is no compiler; install gcc"])
    monkeypatch.setattr(vllm, "_arguments", no_engine)
    with caplog.at_level(logging.WARNING, "delta_weight_sync"), pytest.raises(EngineError, match="is wanted"):
        vllm.start(tmp_path)
    assert caplog.messages == ["there is no compiler; install gcc"]
    monkeypatch.setattr(vllm, "alive", lambda: True)
    assert not vllm.serves(tmp_path), "an engine without an app answers nobody"


@pytest.mark.long
def test_the_image_brings_the_loops_of_a_stage(tmp_path):
    """A new container compiles nothing for its first delta: a second run finds all in the cache."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "inference_space.compiled"]
    found = []
    for _ in range(2):
        subprocess.run(command, env=environment, check=True)
        found.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")})
    names = {path.name.split("-")[0] for path in found[0]}
    compiled = "memory._find memory._bounds positions.band_walk bits.flat_walk _patch._merge"
    assert set(compiled.split()) <= names
    assert found[0] == found[1]
