"""The recipes of docs/engines.md, as printed: with transformers, and with stand-ins for other engines."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from delta_weight_sync.checkpoint import read_bits, to_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.reader import open_run
from tests.support.http_server import Request, answering
from tests.support.published_run import write_run

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of three versions; the working folder is empty."""
    monkeypatch.chdir(tmp_path)
    write_run((tmp_path / "bucket").as_uri(), tmp_path / "base", versions=3)
    return (tmp_path / "bucket").as_uri()


def recipe(engine: str, url: str) -> str:
    """The block after the engine's name, for this run, ending after its newest version."""
    code = re.search(rf"\*\*{engine}\*\*.*?```\w+\n(.*?)```", PAGE, re.DOTALL)
    text = code[1].replace("s3://bucket/prefix#first", url).replace("--into", "--once --into")
    return text.replace('into="build/newest"', 'into="build/newest", once=True')


def shell(code: str) -> None:
    path = f"{Path.cwd()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-euc", code], check=True, env={**os.environ, "PATH": path})


def is_newest(folder: Path, url: str) -> bool:
    return to_hex(state_digest(dict(read_bits(folder)))) == open_run(url).manifest().digest


def test_transformers(url):
    names: dict[str, object] = {}
    exec(recipe("transformers", url).replace("Qwen/Qwen3-0.6B", str(Path("base").absolute())), names)
    published = dict(read_bits(Path("build/newest/current")))
    live = dict(names["model"].named_parameters())
    assert is_newest(Path("build/newest/current"), url)
    assert all((to_bits(live[name]) == bits).all() for name, bits in published.items())


@pytest.mark.full
def test_sglang(url):
    asked: list[Request] = []
    with answering(lambda request: asked.append(request) or (200, {}, b"{}")) as engine:
        shell(recipe("SGLang", url).replace("localhost:30000", engine.removeprefix("http://")))
    (request,) = asked
    assert request.path == "/update_weights_from_disk"
    assert is_newest(Path(json.loads(request.body)["model_path"]), url)


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "program"), [("text-generation-inference", "docker"), ("llama.cpp", "systemctl")]
)
def test_an_engine_that_is_restarted(engine, program, url):
    """When it restarts, it reads the version that is in place."""
    programs = {program: 'echo "$1" > told; cp -rL build/newest/current read'}
    programs["convert_hf_to_gguf.py"] = 'cp "$1/model.safetensors" "$3"'
    for name, code in programs.items():
        Path(name).write_text(f"#!/bin/bash -e\n{code}\n")
        Path(name).chmod(0o755)
    shell(recipe(engine, url))
    assert Path("told").read_text() == "restart\n"
    assert is_newest(Path("read"), url)
    assert engine != "llama.cpp" or Path("build/policy.gguf").exists()
