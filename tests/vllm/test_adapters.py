"""Versions as adapters, with a stand-in for vLLM: what is refused, what is kept, and what goes when."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from delta_weight_sync import Publisher, Run, codec
from delta_weight_sync.checkpoint import ADAPTER, read_bits, write_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.errors import EngineError
from delta_weight_sync.vllm import hooks
from delta_weight_sync.vllm.follower import Follower
from tests.support import tiny_policy as tiny
from tests.support.fake_vllm import InMemoryVllm
from tests.support.waiting import soon

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not hooks.ADAPTERS.works(), reason="this vLLM does not serve versions as adapters"),
]
NAME = "base_model.model.layers.0.q_proj.lora_A.weight"
FITS = [[{"unplaced": [], "misfit": ""}]]


class Client:
    """vLLM's client and its models, as far as the engine uses them."""

    def __init__(self) -> None:
        self.loaded: dict[int, Any] = {}
        self.fails = False
        self.answer = FITS
        self.errored = False
        lora = SimpleNamespace(max_cpu_loras=2, max_lora_rank=16, lora_dtype=torch.bfloat16)
        self.vllm_config = SimpleNamespace(
            lora_config=lora, model_config=SimpleNamespace(enable_sleep_mode=False)
        )
        self.engine_core = self
        self.lora_requests: dict[str, Any] = {}
        self.lora_id_counter = self
        self._numbers = iter(range(1, 1000))

    def inc(self, _: int) -> int:
        return next(self._numbers)

    def is_base_model(self, name: str) -> bool:
        return name == "base"

    async def add_lora(self, request: Any) -> bool:
        if self.fails:
            raise RuntimeError("Traceback\nValueError: no such module")
        sent = msgspec.msgpack.encode(request)  # as the engine's process gets it
        self.loaded[request.lora_int_id] = msgspec.msgpack.decode(sent, type=type(request).__base__)
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.loaded.pop(number, None) is not None

    async def call_utility_all_async(self, *_: Any) -> Any:
        return self.answer


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def engine(client: Client, loop: asyncio.AbstractEventLoop, tmp_path: Path) -> Any:
    from delta_weight_sync.vllm.adapters import AdapterEngine

    return AdapterEngine(client, loop, client, "policy", tmp_path)


def label(version: int) -> str:
    return json.dumps({"version": version, "term": 1, "sync": version})


def checkpoint(folder: Path, seed: int = 0) -> tuple[Path, str]:
    """An adapter of one tensor, and its digest."""
    folder.mkdir(exist_ok=True)
    bits = {NAME: np.random.default_rng(seed).integers(0, 1 << 14, (4, 8)).astype(np.uint16)}
    write_bits({NAME: (4, 8)}, bits.__getitem__, folder / ADAPTER)
    return folder, to_hex(state_digest(bits))


def serve(engine: Any, client: Client, folder: Path, versions: range) -> None:
    for version in versions:
        engine.take_checkpoint(*checkpoint(folder / "made", version), label(version))
        assert client.lora_requests["policy"] is client.lora_requests[f"policy@{version}"]


def test_a_delta_leads_from_the_newest_version_and_leaves_that_one_as_it_is(engine, client, tmp_path):
    old, digest = checkpoint(tmp_path / "old")
    new, wanted = checkpoint(tmp_path / "new", seed=1)
    engine.take_checkpoint(old, digest, label(0))
    before = dict(read_bits(old))
    patch = codec.diff(NAME, before[NAME], dict(read_bits(new))[NAME])
    for version in (1, 2):
        delta = tmp_path / f"delta-{version}"
        delta.write_bytes(codec.encode([patch], before.__getitem__, base=0, version=1))
        if version == 1:
            with pytest.raises(
                EngineError, match=f"policy@1 has digest {wanted}, but {digest} was published"
            ):
                engine.take([delta], digest, label(1))
            assert [*client.lora_requests] == ["policy@0", "policy"], "the last one goes on"
        else:
            engine.take([delta], wanted, label(2))
    places = [Path(client.lora_requests[f"policy@{version}"].lora_path) for version in (0, 2)]
    found = [to_hex(state_digest(dict(read_bits(place)))) for place in places]
    assert found == [digest, wanted]
    engine.relabel(label(3))
    assert Path(client.lora_requests["policy"].lora_path) not in places
    assert client.lora_requests["policy"].label == label(3)


def test_an_engine_that_stops_leaves_no_name_behind(engine, client, tmp_path):
    """The next one of this process removes the folders of these adapters."""
    client.lora_requests["other"] = object()
    serve(engine, client, tmp_path, range(2))
    engine.stop()
    assert [*client.lora_requests] == ["other"]


def test_a_folder_stays_as_long_as_a_request_refers_to_its_version(engine, client, tmp_path):
    serve(engine, client, tmp_path, range(1))
    request = client.lora_requests["policy"]
    place = Path(request.lora_path)
    number = request.lora_int_id
    serve(engine, client, tmp_path, range(1, 5))
    assert [*client.lora_requests] == ["policy", "policy@3", "policy@4"]
    assert place.is_dir()
    assert number in client.loaded
    del request
    assert place.is_dir(), "vLLM may still have to abort a request"
    serve(engine, client, tmp_path, range(5, 6))
    assert not place.exists()
    assert number not in client.loaded
    kept = {each.lora_path for each in client.lora_requests.values()}
    assert {str(each) for each in (tmp_path / "adapters").iterdir()} >= kept


def test_a_version_that_a_request_still_needs_is_not_loaded_a_second_time(engine, client, tmp_path):
    """For vLLM, two adapters of one name are one."""
    serve(engine, client, tmp_path, range(1))
    request = client.lora_requests["policy"]
    serve(engine, client, tmp_path, range(1, 4))
    assert "policy@0" not in client.lora_requests
    serve(engine, client, tmp_path, range(1))  # a pin
    assert client.lora_requests["policy@0"] is client.lora_requests["policy"] is request
    engine.take_checkpoint(*checkpoint(tmp_path / "made", 9), label(0))  # of another writer
    assert client.lora_requests["policy"] is not request
    names = [loaded.lora_name for loaded in client.loaded.values()]
    assert len(names) == len({*names})


def test_a_removal_that_fails_undoes_no_version(engine, client, tmp_path, monkeypatch):
    serve(engine, client, tmp_path, range(4))
    first = min(client.loaded)

    async def fail(_: int) -> bool:
        raise RuntimeError("not now")

    with monkeypatch.context() as broken:
        broken.setattr(client, "remove_lora", fail)
        serve(engine, client, tmp_path, range(4, 6))
    assert first in client.loaded
    serve(engine, client, tmp_path, range(6, 8))
    assert first not in client.loaded
    assert len([*(tmp_path / "adapters").iterdir()]) <= len(client.loaded) + 1


def test_a_version_that_vllm_does_not_load_or_place_is_not_served(engine, client, tmp_path):
    serve(engine, client, tmp_path, range(1))
    served = dict(client.lora_requests)
    client.fails = True
    with pytest.raises(
        EngineError, match=r"vLLM does not load policy@1 \(ValueError: no such module\): start"
    ):
        serve(engine, client, tmp_path, range(1, 2))
    client.fails = False
    client.answer = [[{"unplaced": ["a", "b"], "misfit": ""}, {"unplaced": ["b"], "misfit": ""}]]
    with pytest.raises(
        EngineError, match=r"does not fit .* \(b: vLLM applies no adapter to it\): start vLLM"
    ):
        serve(engine, client, tmp_path, range(1, 2))
    assert client.lora_requests == served
    assert len(client.loaded) == len([*(tmp_path / "adapters").iterdir()]) == 1
    client.answer = [[{"unplaced": ["a"], "misfit": ""}, {"unplaced": ["b"], "misfit": ""}]]
    serve(engine, client, tmp_path, range(1, 2))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda c: setattr(c.vllm_config.model_config, "enable_sleep_mode", True),
            "--enable-sleep-mode takes the weights away .*; start vLLM without it",
        ),
        (
            lambda c: setattr(c, "is_base_model", lambda name: True),
            "base as 'policy', .* --served-model-name",
        ),
        (lambda c: c.lora_requests.update(policy=object()), "already has an adapter named 'policy'"),
        (lambda c: setattr(c.vllm_config.lora_config, "max_lora_rank", 2), "--max-lora-rank, at least 4"),
        (
            lambda c: setattr(c.vllm_config.lora_config, "lora_dtype", torch.float16),
            "is BF16, which vLLM would round to float16: start vLLM with another --dtype",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(change, sentence, engine, client):
    assert engine.learn({NAME: [4, 8]}, {}) == ""
    change(client)
    with pytest.raises(EngineError, match=sentence):
        engine.learn({NAME: [4, 8]}, {})


def test_a_replica_refuses_a_run_of_the_other_kind(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    tiny.build(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    sentences = (
        "publishes whole weights: start vLLM without --enable-lora",
        "an adapter: start vLLM 0.32 or newer",
    )
    for adapter, sentence in enumerate(sentences):
        url = f"{(tmp_path / 'bucket').as_uri()}#run-{adapter}"
        if adapter:
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        with Publisher(url, None if adapter else tmp_path / "base", adapter=bool(adapter)) as publisher:
            publisher.publish(model)
        vllm = InMemoryVllm()
        vllm.adapters = not adapter
        scratch = tmp_path / f"scratch-{adapter}"
        scratch.mkdir()
        follower = Follower(Run(url)._reader, vllm, name="r", folder=scratch, poll_s=0.01)
        follower.start()
        soon(lambda f=follower: f.report(0).status.state == "refused", lambda f=follower: f"{f.report(0)}")
        assert sentence in follower.report(0).status.error
        follower.stop()
        assert not vllm.starts
