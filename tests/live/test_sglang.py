"""The real SGLang follows a real run: exact, undone whole, every token labelled, no stale prefix.

SGLANG_SITE names a folder that holds SGLang (docs/sglang.md says how to fill it). It is not in `.venv`,
because it asks for another torch.
"""

import importlib.util
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync import Publisher, Run
from tests.live.replica import Server
from tests.support import tiny_policy as tiny
from tests.support.waiting import soon
from trainer.demo.processes import free_port

ROOT = Path(__file__).parents[2]
SITE = os.environ.get("SGLANG_SITE", "")
FOUND = bool(SITE or importlib.util.find_spec("sglang"))
pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.skipif(not FOUND, reason="SGLang is not here: docs/sglang.md says how to test with it"),
]
PROMPTS = [[5 + i, 6, 7, 90 + i] * 4 for i in range(6)]
LONG = [3 + 37 * i % 200 for i in range(64)]
RUNNING = [LONG, *PROMPTS[1:3]]  # the prompts of requests during which versions come
MANY = 1900  # tokens of each
ARGUMENTS = (
    "--device cpu --dtype bfloat16 --attention-backend torch_native --sampling-backend pytorch"
    " --grammar-backend none --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
    " --max-total-tokens 8192 --max-running-requests 16 --mem-fraction-static 0.2 --skip-server-warmup"
)


class Trainer:
    """Each version makes other tokens of the same thoughts: the rows of the head move by one."""

    def __init__(self, folder: Path) -> None:
        tiny.build(folder / "base", tie=False, seed=0)
        self.folder = folder / "bucket"
        self.url = f"{self.folder.as_uri()}#live"
        self._model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        self._random = torch.Generator().manual_seed(0)
        self._publisher = Publisher(self.url, folder / "base")

    def publish(self) -> None:
        self._publisher.publish(self._model.named_parameters())
        self._publisher.flush()
        with torch.no_grad():
            head = self._model.get_output_embeddings().weight
            head.copy_(head.roll(1, 0))
            for parameter in self._model.parameters():
                parameter += 1e-4 * torch.randn(parameter.shape, generator=self._random)

    def close(self) -> None:
        self._publisher.close()


class Sglang(Server):
    """SGLang's own server, with the plugin of `pyproject.toml`."""

    patience_s = 900.0  # two processes import SGLang, which takes minutes on a busy machine

    def __init__(self, model: Path, folder: Path, *words: str, **environ: str) -> None:
        folder.mkdir()
        port = free_port()
        points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        (entry,) = points["sglang.srt.plugins"].items()
        info = folder / "site" / "plugins-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            f"[sglang.srt.plugins]\n{' = '.join(entry)}\nfault = sglang_fault:register\n"
        )
        self.fault = folder / "fault"
        path = [ROOT / "shared", folder / "site", ROOT / "tests" / "live" / "sglang_site", SITE]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port"]
        super().__init__(
            [*command, str(port), *ARGUMENTS.split(), *words],
            {
                "PYTHONPATH": ":".join(map(str, path)),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "DELTA_WEIGHT_SYNC_POLL_S": "0.05",
                "SGLANG_FAULT": str(self.fault),
                **environ,
            },
            folder / "log",
            port,
        )

    def ask(self, prompt: list[int], tokens: int = 12) -> dict[str, Any]:
        """The greedy tokens, how many of the prompt's were cached, and what made which of them."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=300).raise_for_status().json()
        meta = answer["meta_info"]
        spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
        return {"tokens": answer["output_ids"], "cached": meta["cached_tokens"], "spans": spans}

    def load(self, model: Path) -> None:
        """Let SGLang's own loader load a checkpoint, and drop all prefixes."""
        body = {"model_path": str(model), "flush_cache": True}
        httpx.post(f"{self.url}/update_weights_from_disk", json=body, timeout=300).raise_for_status()

    def checksums(self) -> dict[str, str]:
        """SGLang's own checksum of each live parameter."""
        answer = httpx.get(f"{self.url}/weights_checker", timeout=60).raise_for_status().json()
        return answer["ranks"][0]["checksums"]


def copy(source: Path, target: Path, damaged: str = "") -> None:
    """Copy a bucket, HEAD last. In deltas whose key has `damaged` in it, a byte is wrong."""
    for heads in (False, True):
        for path in source.rglob("*"):
            if path.is_file() and ("/heads/" in str(path)) == heads:
                to = target / path.relative_to(source)
                data = path.read_bytes()
                if damaged and "/deltas/" in str(path) and damaged in path.name:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                if not to.exists() or to.read_bytes() != data:
                    to.parent.mkdir(parents=True, exist_ok=True)
                    new = to.with_name(f".{to.name}.new")
                    new.write_bytes(data)
                    new.rename(to)


def label(version: int) -> str:
    return f'{{"version":{version},"term":1,"sync":{version + 1}}}'


@pytest.fixture(scope="module", params=["overlap", "no overlap"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a server that follows a run does, and what one does that loads its versions from a folder."""
    folder = tmp_path_factory.mktemp("sglang")
    words = ["--disable-overlap-schedule"] * (request.param == "no overlap")
    trainer = Trainer(folder)
    served = folder / "served"
    found: dict[str, Any] = {"digests": {}, "answers": {}, "checksums": {}, "again": {}}

    def note(version: int) -> None:
        found["digests"][version] = server.wait_for(version)["digest"]
        found["checksums"][version] = server.checksums()
        found["answers"][version] = [server.ask(prompt) for prompt in PROMPTS]
        found["again"][version] = server.ask(PROMPTS[0])

    def publish(damaged: str = "") -> None:
        trainer.publish()
        copy(trainer.folder, served, damaged)

    publish()
    follows = {"DELTA_WEIGHT_SYNC_RUN": f"{served.as_uri()}#live"}
    with (
        Sglang(folder / "base", folder / "fresh", *words) as fresh,
        Sglang(folder / "base", folder / "server", *words, **follows) as server,
    ):
        note(0)
        found["before"] = [server.ask(LONG, 1)["cached"], server.ask(LONG, 1)["cached"]]
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(server.ask, prompt, MANY) for prompt in RUNNING]
            soon(lambda: load(server) == 3, "three requests run")
            publish()
            server.wait_for(1)
            found["old prefix"] = server.ask(LONG, 1)["cached"]
            publish()
            note(2)
            found["still running"] = load(server)
            found["running"] = [each.result() for each in running]
        # The running request filled the cache with the very tokens that are asked for.
        text = [*RUNNING[1], *found["running"][1]["tokens"][:64]]
        found["its tokens"] = server.ask(text, 1)["cached"]
        server.fault.touch()
        publish()
        found["undone"] = server.wait_until(
            lambda status: status["error"] and "read back differently" in status["error"], "undone commit"
        )
        found["after undo"] = server.checksums()
        found["answers after undo"] = [server.ask(prompt) for prompt in PROMPTS]
        server.fault.unlink()
        note(3)
        publish(damaged="00000004.")
        found["damaged"] = server.wait_until(lambda status: status["error"], "damaged version")
        found["answers after damage"] = [server.ask(prompt) for prompt in PROMPTS]
        publish()
        note(5)
        found["commits"] = server.status()["commits"]
        found["engine"] = server.status()["engine"]
        loaded = (0, 2, 5)
        versions = {version: Run(trainer.url).checkout(folder / f"{version}", version) for version in loaded}
        found["published"] = {version: checkout.digest for version, checkout in versions.items()}
        fresh.wait_until_healthy()
        found["fresh long"] = [fresh.ask(prompt, MANY)["tokens"] for prompt in RUNNING]
        found["fresh"] = {}
        found["fresh checksums"] = {}
        for version in loaded:
            fresh.load(folder / f"{version}")
            found["fresh"][version] = [fresh.ask(prompt)["tokens"] for prompt in PROMPTS]
            found["fresh checksums"][version] = fresh.checksums()
    trainer.close()
    return found


def load(server: Sglang) -> int:
    answer = httpx.get(f"{server.url}/v1/loads", timeout=60).raise_for_status().json()
    return int(answer["loads"][0]["num_running_reqs"])


def test_live_weights_are_those_of_the_published_version_bit_for_bit(seen):
    for version, digest in seen["published"].items():
        assert seen["digests"][version] == digest
        assert seen["checksums"][version] == seen["fresh checksums"][version]
    assert seen["checksums"][0] != seen["checksums"][2]


def test_greedy_tokens_are_those_of_a_fresh_load_and_have_the_version_s_label(seen):
    for version, wanted in seen["fresh"].items():
        assert [answer["tokens"] for answer in seen["answers"][version]] == wanted
        for answer in seen["answers"][version]:
            assert answer["spans"] == [(label(version), 0, 12)]
    assert seen["fresh"][0] != seen["fresh"][2] != seen["fresh"][5]


def test_running_requests_go_on_and_each_token_names_what_made_it(seen):
    assert seen["still running"] == 3, "the commits came while they ran"
    for answer, old in zip(seen["running"], seen["fresh long"], strict=True):
        assert [version for version, _, _ in answer["spans"]] == [label(0), label(1), label(2)]
        starts = [start for _, start, _ in answer["spans"]]
        ends = [end for _, _, end in answer["spans"]]
        assert [*starts, MANY] == [0, *ends]
        assert answer["tokens"][: ends[0]] == old[: ends[0]]
        assert answer["tokens"][ends[0]] != old[ends[0]], "the next token is of the next version"


def test_no_request_reuses_a_prefix_of_other_weights(seen):
    assert seen["before"] == [0, len(LONG) - 1], "prefixes are cached"
    assert seen["old prefix"] == 0
    assert seen["its tokens"] == len(RUNNING[1]), "its prompt was asked again with the new weights"
    for version, again in seen["again"].items():
        assert seen["answers"][version][0]["cached"] == 0, f"version {version}"
        assert again["cached"] == len(PROMPTS[0]) - 1


def test_a_commit_that_goes_wrong_is_undone_and_the_next_one_repairs_it(seen):
    assert seen["undone"]["version"] == 2
    assert seen["after undo"] == seen["checksums"][2]
    for answer, before in zip(seen["answers after undo"], seen["answers"][2], strict=True):
        assert answer["tokens"] == before["tokens"]
        assert answer["spans"] == before["spans"]


def test_a_damaged_version_is_not_served_and_does_not_stop_the_server(seen):
    assert seen["damaged"]["version"] == 3
    assert seen["damaged"]["state"] == "serving"
    for answer, before in zip(seen["answers after damage"], seen["answers"][3], strict=True):
        assert answer["tokens"] == before["tokens"]
        assert answer["spans"] == before["spans"]


def test_the_status_names_the_engine_and_its_commits(seen):
    assert seen["engine"].startswith("sglang ")
    assert [commit["version"] for commit in seen["commits"]] == [0, 1, 2, 3, 5]


@pytest.mark.parametrize(
    ("words", "environ", "sentence"),
    [
        ("--tp-size 2", {}, "with --tp-size 2, this SGLang cannot take commits: start it without"),
        (
            "",
            {"DELTA_WEIGHT_SYNC_KEY": "x"},
            "DELTA_WEIGHT_SYNC_KEY: SGLang has no routes for it: use --api-key",
        ),
        (
            "",
            {"DELTA_WEIGHT_SYNC_RNU": "x"},
            "correct these variables: DELTA_WEIGHT_SYNC_RNU: there is no such variable",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence_before_a_process_is_started(
    tmp_path, words, environ, sentence
):
    tiny.build(tmp_path / "base", tie=True, seed=0)
    url = (tmp_path / "bucket").as_uri()
    server = Sglang(
        tmp_path / "base",
        tmp_path / "server",
        *words.split(),
        DELTA_WEIGHT_SYNC_RUN=f"{url}#live",
        **environ,
    )
    done = subprocess.run(
        server._command, env={**os.environ, **server._environ}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"delta_weight_sync: {sentence}"
