"""vLLM serves versions as adapters, side by side, and each request ends on the one that it began with."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from delta_weight_sync import Publisher, Run
from delta_weight_sync.records import Head, Manifest, Writer, reference
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, new_pair
from delta_weight_sync.vllm import hooks
from tests.live.replica import PROMPTS, Server, order, served
from tests.support import tiny_policy as tiny
from tests.support.waiting import PATIENCE_S, soon

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.skipif(not hooks.ADAPTERS.works(), reason="this vLLM does not serve versions as adapters"),
]
RUN = "wordle"
LONG = 1800
OPTIONS = {"enable-lora": True, "max-loras": 2, "max-model-len": 2048, "block-size": 32}
ASKED = [*PROMPTS, [3 + 37 * i % 200 for i in range(100)]]  # the last has whole blocks, which vLLM caches
PAIR = new_pair()


def adapted(base: Path, **options: Any) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"} | options
    return get_peft_model(model, LoraConfig(**settings))


@torch.no_grad()
def step(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn_like(parameter)


def complete(server: Server, model: str, prompt: list[int], tokens: int = 24, **more: Any) -> httpx.Response:
    asked = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    asked |= {"logprobs": 0, "return_token_ids": True, **more}
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S)


def answers(server: Server, model: str, made_by: str = "", tokens: int = 24) -> list[Any]:
    """Tokens and logprobs of greedy answers. `made_by`: the model that each must name."""
    found = []
    for prompt in ASKED:
        content = complete(server, model, prompt, tokens).raise_for_status().json()
        assert content["model"] == (made_by or model)
        (choice,) = content["choices"]
        found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return found


def labels(response: httpx.Response) -> list[Any]:
    """Version and tokens of each entry of the header."""
    made_by = json.loads(response.headers.get("x-policy-versions", "[]"))
    return [(entry["weights"] and entry["weights"]["version"], entry["tokens"]) for entry in made_by]


class Stream:
    """A long answer that arrives while other things happen."""

    def __init__(self, server: Server, model: str) -> None:
        self.tokens: list[int] = []
        self.models = set[str]()
        self.made_by: Any = None
        self._ask = {
            "model": model,
            "prompt": PROMPTS[0],
            "max_tokens": LONG,
            "temperature": 0,
            "stream": True,
        }
        self._ask |= {"ignore_eos": True, "return_token_ids": True}
        self._url = f"{server.url}/v1/completions"
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        soon(lambda: len(self.tokens) > 8, lambda: "no token came")

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._ask, timeout=PATIENCE_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    self.models.add(chunk["model"])
                    self.tokens += chunk["choices"][0]["token_ids"] or []
                    self.made_by = chunk.get("policy_versions", self.made_by)

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self.goes_on


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    tiny.build(folder / "base", tie=True, seed=0)
    for name in ("replica", "alone"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def url(place: Path) -> str:
    return f"{(place / 'bucket').as_uri()}#{RUN}"


@pytest.fixture(scope="module")
def replica(place: Path, url: str) -> Iterator[Server]:
    """It waits for the first version."""
    place.joinpath("bucket").mkdir()
    environ = {PUBLIC_KEY: PAIR[PUBLIC_KEY]}
    with served(place / "base", url, place / "replica", environ, **OPTIONS) as server:
        yield server


def test_two_versions_in_flight_answer_as_each_does_alone(place, url, replica):
    model = adapted(place / "base")
    with Publisher(url, adapter=True, signing_key=PAIR[SIGNING_KEY], state_minutes=0) as publisher:
        step(model)
        publisher.publish(model)
        publisher.flush()
        replica.wait_for(0)
        before = answers(replica, RUN, f"{RUN}@0")
        stream = Stream(replica, RUN)
        step(model)
        publisher.publish(model)
        assert publisher.flush().version == 1
        replica.wait_for(1)
        newest = complete(replica, RUN, PROMPTS[0])
        assert stream.goes_on, "a longer answer is needed"
        assert newest.json()["model"] == f"{RUN}@1"
        assert labels(newest) == [(1, [[0, 0, 24]])]
        beside = answers(replica, RUN, f"{RUN}@1"), answers(replica, f"{RUN}@0")
        assert stream.goes_on, "a longer answer is needed"
        stream.wait()
    assert stream.models == {f"{RUN}@0"}
    ((only,),) = (stream.made_by,)
    assert (only["weights"]["version"], only["tokens"]) == (0, [[0, 0, LONG]])
    assert len(stream.tokens) == LONG
    base = complete(replica, "policy", PROMPTS[0])
    assert labels(base) == [(None, [[0, 0, 24]])], "the base was never published"
    for version in (0, 1):
        Run(url).checkout(place / f"version-{version}", version)
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with served(place / "base", "", place / "alone", allowed, **OPTIONS | {"max-loras": 1}) as alone:
        for version in (0, 1):
            adapter = {"lora_name": str(version), "lora_path": str(place / f"version-{version}")}
            httpx.post(f"{alone.url}/v1/load_lora_adapter", json=adapter, timeout=60).raise_for_status()
        assert answers(alone, "1") == beside[0]
        assert answers(alone, "0") == beside[1]
        long = complete(alone, "0", PROMPTS[0], LONG).json()["choices"][0]
    assert before == beside[1]
    assert beside[0] != beside[1]
    assert long["token_ids"] == stream.tokens


def test_old_versions_go_and_their_requests_end_on_them(place, url, replica):
    """Two fit. The third and fourth push out the one that still answers, which vLLM then loads again."""
    model = adapted(place / "base")
    stream = Stream(replica, f"{RUN}@1")
    with Publisher(url, adapter=True, signing_key=PAIR[SIGNING_KEY], fresh=True) as publisher:
        for version in (2, 3, 4):
            step(model)
            publisher.publish(model)
            manifest = publisher.flush()
            assert manifest.version == version
            replica.wait_for(version)
            answers(replica, RUN, f"{RUN}@{version}", tokens=2)
        assert stream.goes_on, "a longer answer is needed"
        print("bytes of one sync:", manifest.delta[0].size, "of", manifest.full_bytes)
        assert complete(replica, f"{RUN}@1", PROMPTS[0]).status_code == 404
        listed = httpx.get(f"{replica.url}/v1/models").json()["data"]
        assert {each["id"] for each in listed} == {"policy", f"{RUN}@3", f"{RUN}@4"}
        stream.wait()
        assert stream.models == {f"{RUN}@1"}
        assert len(stream.tokens) == LONG
        step(model)
        publisher.publish(model)
        replica.wait_for(publisher.flush().version)
    left = {path.name.rsplit("-", 1)[0] for path in (place / "replica/adapters").iterdir()}
    assert left <= {f"{RUN}@{version}" for version in (3, 4, 5)}, "the folders of 1 and 2 are gone"


def test_a_forged_and_a_damaged_version_are_not_served(place, url, replica):
    before = answers(replica, RUN, f"{RUN}@5")
    run = Run(url)
    bucket = run._reader.bucket
    keys = run._reader.keys
    newest = run.manifest()
    writer = Writer(newest.writer_term + 1, "e" * 32)
    forged = Manifest(
        **{**dict(newest), "seal": "", "digest": "0" * 16, "writer_term": writer.term, "writer": writer.id}
    )
    ref = reference(keys.manifest(forged.version, writer), forged)
    head = Head(
        run=RUN,
        born=newest.born,
        version=forged.version,
        manifest=ref,
        writer_term=writer.term,
        writer=writer.id,
    )
    bucket.put(ref.key, forged.to_bytes())
    bucket.put(keys.head(writer), head.to_bytes())
    replica.wait_until(lambda status: "sign" in str(status["error"]), "refusal of the forgery")
    assert answers(replica, RUN, f"{RUN}@5") == before
    bucket.delete([keys.head(writer), ref.key])
    replica.wait_until(lambda status: not status["error"], "recovery")

    model = adapted(place / "base")
    with Publisher(url, adapter=True, signing_key=PAIR[SIGNING_KEY], fresh=True) as publisher:
        publisher.publish(model)
        publisher.flush()
        replica.wait_for(6)
        before = answers(replica, RUN, f"{RUN}@6")
        order(replica, "pause")
        step(model)
        publisher.publish(model)
        (delta,) = publisher.flush().delta
        data = bucket.get(delta.key)
        bucket.put(delta.key, data[:-1] + bytes([data[-1] ^ 1]))
        order(replica, "resume")
        replica.wait_until(lambda status: "not the published object" in str(status["error"]), "refusal")
        assert answers(replica, RUN, f"{RUN}@6") == before
        bucket.put(delta.key, data)
        replica.wait_for(7)
    assert answers(replica, RUN, f"{RUN}@7") != before


def test_an_adapter_of_another_base_is_refused_until_the_run_has_one_that_fits(place, tmp_path):
    """vLLM itself would load the first two: it fills up the smaller one with zeros, and leaves out layers."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    run = f"{bucket.as_uri()}#other"
    config = Qwen3Config.from_pretrained(place / "base")
    smaller = {"hidden_size": 32}, "has 128 inputs and .64. outputs, but the adapter .128. and .32."
    deeper = {"num_hidden_layers": 4}, "model.layers.2..*: vLLM applies no adapter to it"
    (tmp_path / "replica").mkdir()
    with served(place / "base", run, tmp_path / "replica", **OPTIONS) as replica:
        for change, sentence in (smaller, deeper):
            with torch.random.fork_rng():
                other = Qwen3ForCausalLM(Qwen3Config(**{**config.to_dict(), **change, "layer_types": None}))
            with Publisher(run, adapter=True) as publisher:
                publisher.publish(get_peft_model(other, LoraConfig(r=8, target_modules="all-linear")))
            status = replica.wait_until(lambda status: status["state"] == "refused", "refusal")
            assert re.search(sentence, status["error"])
            assert complete(replica, "other", PROMPTS[0]).status_code == 404
            shutil.rmtree(bucket / "runs/other")
        with Publisher(run, adapter=True) as publisher:
            publisher.publish(adapted(place / "base", r=32))
        replica.wait_until(lambda status: "--max-lora-rank, at least 32" in str(status["error"]), "rank")
        shutil.rmtree(bucket / "runs/other")
        with Publisher(run, adapter=True) as publisher:
            publisher.publish(adapted(place / "base"))
        replica.wait_for(0)
        answers(replica, "other", "other@0")
