"""vLLM's weight transfer API, both sides, over a vLLM in memory. tests/live has a real one."""

import asyncio
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from fastapi import FastAPI, HTTPException

from delta_weight_sync.errors import ConfigError, EngineError
from delta_weight_sync.reader import open_run
from delta_weight_sync.vllm import PROCESSED, hooks
from delta_weight_sync.vllm.server import PREFIX, Endpoint, _answer_trainers, settings_from
from tests.support import tiny_policy as tiny
from tests.support.real_run import RealRun

if not hooks.TRANSFER.works():
    pytest.skip("this vLLM has another weight transfer API", allow_module_level=True)

from vllm.distributed.weight_transfer import (
    ModuleSource,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

from delta_weight_sync.vllm.transfer import DeltaWeightTransferEngine, Updates, is_chosen
from delta_weight_sync.weight_transfer import DeltaTrainerInitInfo


@pytest.fixture
def run(bucket):
    run = RealRun(bucket.bucket, run="ordered", layers=1)
    run.step()
    yield run
    run.close()


class Calls:
    """vLLM's client of a server; notes what it is asked."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.asked: list[tuple] = []
        self._failure = failure

    def __getattr__(self, name):
        def ask(*arguments):
            self.asked.append((name, *arguments))
            if self._failure and name == "update_weights":
                raise self._failure

        return ask


@pytest.fixture
def policy(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    tiny.build(tmp_path / "base", tie=True, seed=0)
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "base"


def trainer(url: str, policy, client, source=None, rank: int = 0, **options):
    model, base = policy
    info = DeltaTrainerInitInfo(url, base=base, timeout_s=5.0, rank=rank, options=options)
    return WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=source or ModuleSource(model)
    )


def updates(follower=None, told=None) -> Updates:
    return Updates(lambda: follower, (told if told is not None else []).append, lambda: None)


def refusal(call) -> tuple[int, str]:
    with pytest.raises(HTTPException) as caught:
        asyncio.run(call)
    return caught.value.status_code, caught.value.detail


def test_a_trainer_names_its_run_then_each_version(policy, tmp_path):
    url = f"{(tmp_path / 'bucket').as_uri()}#named"
    client = Calls()
    engine = trainer(url, policy, client)
    for _ in range(2):
        engine.send_weights()
        with torch.no_grad():
            policy[0].model.norm.weight.mul_(2)
    engine.shutdown()
    engine.shutdown()
    versions = sorted(open_run(url).versions(), key=lambda manifest: manifest.version)
    wanted = [{"version": m.version, "digest": m.digest, "timeout_s": 5.0} for m in versions]
    rounds = [
        (("start_weight_update",), ("update_weights", each), ("finish_weight_update",)) for each in wanted
    ]
    assert client.asked == [("init_weight_transfer_engine", {"run": url}), *rounds[0], *rounds[1]]


def test_no_server_is_told_to_go_back_to_the_base_by_mistake(policy, tmp_path):
    model, base = policy
    url = f"{(tmp_path / 'bucket').as_uri()}#again"
    first = trainer(url, policy, Calls())
    first.send_weights()
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    first.send_weights()
    first.shutdown()
    restarted = type(model).from_pretrained(base), base
    client = Calls()
    with pytest.raises(ConfigError, match="starts with the weights of version 0"):
        trainer(url, restarted, client).send_weights()
    assert [name for name, *_ in client.asked] == ["init_weight_transfer_engine"]
    meant = trainer(url, restarted, client, fresh=True)
    meant.send_weights()
    meant.shutdown()
    assert [(m.version, m.sync) for m in open_run(url).versions()] == [(2, 3), (1, 2), (0, 1)]


def test_other_ranks_only_gather(policy, tmp_path):
    gathered = []

    class Gathering(ModuleSource):
        def __iter__(self):
            for name, tensor in super().__iter__():
                gathered.append(name)
                yield name, tensor

    client = Calls()
    engine = trainer((tmp_path / "bucket").as_uri(), policy, client, Gathering(policy[0]), rank=1)
    engine.send_weights()
    engine.shutdown()
    assert gathered == [name for name, _ in policy[0].named_parameters()]
    assert client.asked == []
    assert not (tmp_path / "bucket").exists()


def test_a_source_that_is_cut_between_ranks_is_refused_before_the_run_opens(policy, tmp_path):
    class Half(WeightSource):
        def metadata(self):
            return [ParamMeta(name, torch.bfloat16, (2,)) for name in "ab"]

        def __iter__(self):
            raise AssertionError

        def held_names(self):
            return {"a"}

    with pytest.raises(ConfigError, match="rank 0 does not hold b, one of 1 tensors"):
        trainer((tmp_path / "bucket").as_uri(), policy, Calls(), Half())
    assert not (tmp_path / "bucket").exists()
    info = DeltaTrainerInitInfo("file:///none", rank=0)
    with pytest.raises(ConfigError, match=r"pass source=ModuleSource\(model\)"):
        WeightTransferTrainerFactory.trainer_init(info, client=Calls())


def test_the_trainer_gets_the_servers_sentence(policy, tmp_path):
    response = requests.Response()
    response.status_code = 409
    response._content = b'{"error": {"message": "paused"}}'
    failure = requests.HTTPError("409 Client Error", response=response)
    engine = trainer((tmp_path / "bucket").as_uri(), policy, Calls(failure))
    with pytest.raises(EngineError, match="vLLM refused the weight update: paused"):
        engine.send_weights()
    response.status_code, response.url = 404, "http://vllm/update_weights"
    with pytest.raises(EngineError, match="start vLLM with VLLM_SERVER_DEV_MODE=1"):
        engine.send_weights()
    engine.shutdown()


def test_an_update_returns_when_the_version_is_live(follower, run, vllm):
    follower.start()
    newest = run.step()
    wanted = SimpleNamespace(update_info={"version": newest.version, "digest": newest.digest})
    asyncio.run(updates(follower).update_weights(wanted))
    assert vllm.digest() == newest.digest


def test_an_update_that_cannot_be_is_refused_with_the_reason(follower, run):
    newest = run.step()
    follower.start()
    answers = updates(follower)
    body = {"version": newest.version, "digest": "0" * 16, "timeout_s": 0.5}
    assert refusal(answers.update_weights(SimpleNamespace(update_info=body)))[0] == 504, (
        "another term's version"
    )
    follower.commands.pause()
    held = refusal(answers.update_weights(SimpleNamespace(update_info=body | {"version": 99})))
    assert held == (409, "version 99 is not live: paused: newer versions wait until you resume this replica")
    assert refusal(answers.update_weights(SimpleNamespace(update_info={"version": -1})))[0] == 400
    assert refusal(answers.update_weights(SimpleNamespace(update_info=[])))[0] == 400
    assert refusal(updates().update_weights(SimpleNamespace(update_info=body)))[0] == 409
    assert refusal(answers.start_draft_weight_update())[0] == 400
    assert refusal(answers.finish_weight_update("mine"))[0] == 400


def test_a_run_is_named_by_nothing_but_its_url():
    told: list[str] = []
    answers = updates(told=told)
    asyncio.run(answers.init_weight_transfer_engine(SimpleNamespace(init_info={"run": "file:///a#b"})))
    assert told == ["file:///a#b"]
    for wrong in ({}, {"run": 1}, {"run": "file:///a#b", "key": "x"}):
        assert refusal(answers.init_weight_transfer_engine(SimpleNamespace(init_info=wrong)))[0] == 400


def client(backend: str, processes: int = 1) -> Any:
    chosen = SimpleNamespace(backend=backend)
    parallel = SimpleNamespace(_api_process_count=processes)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(weight_transfer_config=chosen, parallel_config=parallel)
    )


def test_only_the_client_of_a_vllm_that_chose_the_backend_is_answered_for():
    assert not is_chosen(client("nccl"))
    assert is_chosen(client("delta_weight_sync"))


@pytest.mark.parametrize("backend", ["nccl", "delta_weight_sync"])
def test_several_api_servers_are_refused_because_only_one_would_know_the_version(backend, tmp_path):
    app = FastAPI()
    app.state.delta_weight_sync = settings_from({f"{PREFIX}RUN": f"{tmp_path.as_uri()}#run"})
    with pytest.raises(ConfigError, match="start vLLM with --api-server-count 1"):
        asyncio.run(Endpoint().init_state(client(backend, processes=2), app.state, Namespace()))
    assert not hasattr(app.state, "follower")


def test_a_vllm_that_follows_another_run_later_keeps_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(f"{PREFIX}FOLDER", str(tmp_path / "folder"))
    asked = client("delta_weight_sync")
    asked.vllm_config.lora_config = None
    asked.vllm_config.model_config = SimpleNamespace(logprobs_mode=PROCESSED, get_diff_sampling_param=dict)
    asked.errored = False

    async def follow_both() -> None:
        _answer_trainers(asked, state := SimpleNamespace(), asyncio.get_running_loop())
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            run = f"{(tmp_path / name).as_uri()}#run"
            await asked.init_weight_transfer_engine(SimpleNamespace(init_info={"run": run}))
            assert state.folder == tmp_path / "folder"
            await asked.shutdown_weight_transfer_engine()

    asyncio.run(follow_both())


def test_without_a_server_or_the_plugin_it_says_what_to_do(monkeypatch):
    parts = [SimpleNamespace(parallel_config=None, model_config=None)] * 4
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ConfigError, match="needs VLLM_PLUGINS=delta_weight_sync"):
        DeltaWeightTransferEngine(*parts)
    monkeypatch.setenv("VLLM_PLUGINS", "delta_weight_sync")
    engine = DeltaWeightTransferEngine(*parts)
    engine.shutdown()
    for call in (engine.start_weight_update, engine.finish_weight_update):
        with pytest.raises(ConfigError, match="start `vllm serve`"):
            call()


@pytest.mark.full
def test_the_plugin_registers_the_backend_even_if_nobody_names_the_plugin():
    """Else vLLM would only say that there is no such backend."""
    code = """
from delta_weight_sync.vllm import plugin
plugin.register()
plugin.register()
from vllm.distributed.weight_transfer import WeightTransferEngineFactory as factory
class Any: backend, parallel_config, model_config = "delta_weight_sync", 0, 0
factory.create_engine(Any, Any, Any, Any)
"""
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert "ConfigError: the weight transfer backend 'delta_weight_sync' needs VLLM_PLUGINS" in done.stderr
