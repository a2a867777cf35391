"""A `transformers.Trainer` with nothing of ours but the callback: the newest version holds its weights."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from delta_weight_sync import PublishCallback, Publisher
from delta_weight_sync.checkpoint import read_bits, to_bits
from delta_weight_sync.reader import open_run
from delta_weight_sync.runlog import RunLogReader, StepEvent
from delta_weight_sync.store import open_bucket

QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-3}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"{(tmp_path / 'bucket').as_uri()}#sft"


class Weights(TrainerCallback):
    """Keeps the bits that the trainer had after each step."""

    def __init__(self) -> None:
        self.bits: dict[int, dict[str, np.ndarray]] = {}

    def on_train_begin(self, args, state, control, model=None, **others):
        self.bits[state.global_step] = {name: to_bits(tensor) for name, tensor in model.named_parameters()}

    on_step_end = on_train_begin


def trainer(base: Path, folder: Path, *callbacks: TrainerCallback, **options) -> Trainer:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.model.embed_tokens.requires_grad_(False)
    numbers = np.random.default_rng(0).integers(5, 90, (64, 8)).tolist()
    examples = Dataset.from_dict({"input_ids": numbers, "labels": numbers})
    settings = {"save_strategy": "no", "per_device_train_batch_size": 2, "max_steps": 3, **QUIET, **options}
    args = TrainingArguments(output_dir=str(folder), **settings)
    return Trainer(model, args, train_dataset=examples, eval_dataset=examples, callbacks=[*callbacks])


def require_published(url: str, seen: Weights, folder: Path) -> list[int]:
    """Every version holds the bits that the trainer had at its sync. Returns the syncs, oldest first."""
    reader = open_run(url)
    manifests = sorted(reader.versions(), key=lambda manifest: manifest.version)
    for manifest in manifests:
        held = reader.checkout(manifest, folder / str(manifest.version))
        assert held.keys() == seen.bits[manifest.sync].keys()
        for name, bits in seen.bits[manifest.sync].items():
            np.testing.assert_array_equal(held[name], bits)
    return [manifest.sync for manifest in manifests]


@pytest.mark.full
def test_sft_publishes_its_weights_bit_for_bit(base, url, tmp_path):
    """TRL's own trainer, in bf16 on a text data set."""
    seen = Weights()
    settings = {"max_steps": 3, "bf16": False, "save_strategy": "no", "max_length": 16}
    args = SFTConfig(str(tmp_path / "sft"), **settings, **QUIET)
    with Publisher(url, base) as publisher:
        SFTTrainer(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16),
            args=args,
            train_dataset=Dataset.from_dict({"text": ["the sky is blue"] * 32}),
            processing_class=AutoTokenizer.from_pretrained(base),
            callbacks=[PublishCallback(publisher), seen],
        ).train()
        assert require_published(url, seen, tmp_path / "out")[-1] == 3, "it is there when `train` returns"
    assert open_run(url).manifest().changed > 0


def test_only_optimizer_steps_publish_and_frozen_parts_are_whole(base, url, tmp_path):
    seen = Weights()
    with Publisher(url, base) as publisher:
        callback = PublishCallback(publisher)
        trainer(
            base, tmp_path / "out", callback, seen, gradient_accumulation_steps=4, logging_steps=1
        ).train()
        assert repr(callback).startswith("<PublishCallback of <Publisher of file://")
        assert publisher.sync == 3
    syncs = require_published(url, seen, tmp_path / "held")
    assert (syncs[0], syncs[-1]) == (0, 3), "syncs may share a version"
    assert sorted(seen.bits) == [0, 1, 2, 3]
    logged = RunLogReader(open_bucket(url.removesuffix("#sft")), "sft").poll()
    steps = [event for event in logged if isinstance(event, StepEvent)]
    assert [step.step for step in steps if "loss" in step.metrics] == [1, 2, 3]
    frozen = "model.embed_tokens.weight"
    assert (seen.bits[0][frozen] == seen.bits[3][frozen]).all()


def test_an_evaluation_publishes_nothing(base, url, tmp_path):
    with Publisher(url, base) as publisher:
        trainer(base, tmp_path / "out", PublishCallback(publisher)).evaluate()
    assert list(open_run(url).versions()) == []


def test_a_resumed_trainer_begins_with_the_weights_of_its_checkpoint(base, url, tmp_path):
    """The first trainer went on for a step after it had saved. Replicas go back with the second one."""
    seen = Weights()
    save = {"save_strategy": "steps", "save_steps": 2}
    with Publisher(url, base) as publisher:
        trainer(base, tmp_path / "out", PublishCallback(publisher), seen, **save).train()
    again = Weights()
    with Publisher(url, base) as publisher:
        resumed = trainer(base, tmp_path / "out", PublishCallback(publisher), again, max_steps=5)
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert sorted(again.bits) == [2, 3, 4, 5]
    for name, bits in seen.bits[2].items():
        np.testing.assert_array_equal(again.bits[2][name], bits)
    newest = open_run(url).manifest()
    held = open_run(url).checkout(newest, tmp_path / "held")
    assert newest.sync == 5
    for name, bits in again.bits[5].items():
        np.testing.assert_array_equal(held[name], bits)


def test_adapters_are_published_merged(base, url, tmp_path):
    """An ordinary trainer with a LoRA model; the base is frozen, and its layers alone are adapted."""
    with Publisher(url, base) as publisher:
        begun = trainer(base, tmp_path / "out", PublishCallback(publisher))
        begun.model = get_peft_model(begun.model, LoraConfig(target_modules=["q_proj"]))
        begun.callback_handler.model = begun.model
        begun.train()
    newest = open_run(url).manifest()
    held = open_run(url).checkout(newest, tmp_path / "held")
    changed = {name for name, bits in read_bits(base) if (held[name] != bits).any()}
    assert newest.sync == 3
    assert changed == {name for name in held if "q_proj" in name}
    for name, tensor in begun.model.merge_and_unload().named_parameters():
        assert (held[name] != to_bits(tensor)).mean() < 1e-3, name  # PEFT rounds twice


@pytest.mark.long
def test_several_processes_publish_one_run(base, url, tmp_path):
    """Under torchrun, with DDP: each rank has the callback."""
    script = tmp_path / "script.py"
    script.write_text("""
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from delta_weight_sync import PublishCallback, Publisher
from tests.publish.test_callback import trainer

dist.init_process_group("gloo")
base, url, out = sys.argv[1:]
with Publisher(url, base) as publisher:
    begun = trainer(Path(base), Path(out), PublishCallback(publisher))
    begun.train()
    if publisher.is_main:
        begun.model.to(torch.bfloat16).save_pretrained(Path(out) / "end")
dist.destroy_process_group()
""")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*words, str(base), url, str(tmp_path / "out")],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": f"{root}:{root / 'shared'}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    newest = open_run(url).manifest()
    held = open_run(url).checkout(newest, tmp_path / "held")
    assert newest.sync == 3
    end = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "end", dtype=torch.bfloat16)
    for name, tensor in end.named_parameters():
        np.testing.assert_array_equal(held[name], to_bits(tensor))
