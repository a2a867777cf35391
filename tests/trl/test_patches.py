"""The patches of TRL's rollout process do what they replace, and its weights have their checkpoint names."""

import multiprocessing
import socket
from types import SimpleNamespace

import peft
import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from delta_weight_sync import RolloutError
from delta_weight_sync.trl import patches, trainer
from tests.support import tiny_policy as tiny
from tests.support.http_server import answering


def test_frozen_parameters_are_handed_over_under_their_checkpoint_names():
    """Version 0 is a whole checkpoint, so it needs what TRL leaves out; tied weights come once."""
    inner = torch.nn.Linear(2, 2)
    inner.weight.requires_grad_(False)
    model = torch.nn.ModuleDict({"_checkpoint_wrapped_module": inner, "embed": torch.nn.Embedding(3, 2)})
    model["head"] = torch.nn.Linear(2, 3, bias=False)
    model["head"].weight = model["embed"].weight
    named = dict(trainer.live_weights(torch.nn.ModuleDict({"module": model})))
    assert list(named) == ["weight", "bias", "embed.weight"]
    assert named["weight"] is inner.weight


def test_a_trainer_whose_vllm_does_not_answer_ends_with_one_sentence(monkeypatch, capfd):
    monkeypatch.setattr(patches, "_SERVER_S", 0.5)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RolloutError, match=f"^no vLLM answers at {url} .*: start it, or correct"):
            patches.start(SimpleNamespace(settings={"vllm_server_url": url}))
    assert f"for vLLM at {url}" in capfd.readouterr().err
    with answering(lambda _: (401, {}, b"")) as url:  # a proxy in front of a vLLM
        patches._await_server(url)
    with pytest.raises(RolloutError, match=r"^no vLLM answers at localhost:8000"):
        patches.start(SimpleNamespace(settings={"vllm_server_url": "localhost:8000"}))


@pytest.mark.full
def test_a_process_that_died_while_it_waited_does_not_keep_the_trainer():
    """Python's `Event.set` waits forever for a process that was killed in `Event.wait`."""
    context = multiprocessing.get_context("fork")
    event = context.Event()
    ready = context.Barrier(3)
    killed, alive = (context.Process(target=_wait, args=(ready, event), daemon=True) for _ in range(2))
    for process in (killed, alive):
        process.start()
    ready.wait()
    while event._cond._sleeping_count.get_value() < 2:
        pass
    killed.kill()
    killed.join()
    PartialState()  # TRL's log needs it; a trainer has it
    worker = object.__new__(AsyncRolloutWorker)
    worker._process = alive
    worker.process = alive
    worker._stop_event_mp = event
    patches.stop(worker)
    assert not alive.is_alive()


def test_a_merged_model_is_handed_over_under_trls_names(tmp_path):
    """TRL's own function is private; ours must yield tensors of the same names and shapes, in its order."""
    tiny.build(tmp_path, tie=False)
    adapters = [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
        {"target_modules": ["v_proj"], "use_dora": True},
    ]
    for options in adapters:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
        model = peft.get_peft_model(plain, peft.LoraConfig(**options))
        theirs = [(name, p.shape) for name, p in async_grpo_trainer._iter_vllm_named_params(model)]
        trainer = SimpleNamespace(accelerator=SimpleNamespace(unwrap_model=lambda one: one), model=model)
        assert [(name, tensor.shape) for name, tensor in patches.weights(trainer)] == theirs


def _wait(ready, event):
    ready.wait()
    event.wait()
