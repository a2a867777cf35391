"""A TRL that has only what the release notes of 1.18 name: one sentence says which release fits.

The notes remove five submodules of `trl.experimental.async_grpo`, have the loop in
`trl.trainer.async_grpo_trainer` and the client in `trl.generation.async_vllm_client`, and drop two arguments
of the trainer. The package index that the tests use has no such release.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny_policy as tiny

TRAINER = """
from transformers import Trainer

class AsyncGRPOTrainer(Trainer):
    def __init__(self, model, reward_funcs=None, args=None, train_dataset=None, callbacks=None):
        super().__init__(model, args, train_dataset=train_dataset, callbacks=callbacks)
"""
FILES = {
    "trl/__init__.py": "",
    "trl/trainer/__init__.py": "",
    "trl/trainer/async_grpo_trainer.py": TRAINER,
    "trl/generation/__init__.py": "",
    "trl/generation/async_vllm_client.py": "class AsyncVLLMClient: pass\n",
    "trl/experimental/__init__.py": "",
    "trl-1.18.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: trl\nVersion: 1.18.0\n",
}
SENTENCE = (
    "trl 1.18.0 has no AsyncGRPOTrainer.__init__ with weight_transfer in trl.trainer.async_grpo_trainer,"
    " needed for `BucketWeightTransfer`: pip install 'trl==1.16.*'"
)


@pytest.fixture
def run(tmp_path: Path):
    """Runs code in a Python whose TRL is the stand-in."""
    site = tmp_path / "site"
    for name, text in FILES.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root = Path(__file__).parents[2]
    path = f"{site}:{root / 'shared'}:{root}"

    def run(code: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", code]
        return subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})

    return run


@pytest.mark.full
def test_the_transfer_is_refused_with_the_release_that_fits(run, tmp_path):
    done = run(f"""
from delta_weight_sync import BucketWeightTransfer
BucketWeightTransfer("{(tmp_path / "bucket").as_uri()}", "base")
""")
    assert done.stderr.splitlines()[-1] == f"delta_weight_sync.errors.CompatibilityError: {SENTENCE}"
    assert not (tmp_path / "bucket").exists()


@pytest.mark.long
def test_the_callback_publishes_the_moved_trainer(run, tmp_path):
    """It needs nothing of TRL, so it is the way to publish from a release that takes no `weight_transfer`."""
    tiny.build(tmp_path / "base")
    done = run(f"""
from trl.trainer.async_grpo_trainer import AsyncGRPOTrainer
from transformers import AutoModelForCausalLM, TrainingArguments
from delta_weight_sync import PublishCallback, Publisher, Run

base, url = "{tmp_path / "base"}", "{(tmp_path / "bucket").as_uri()}#moved"
args = TrainingArguments("{tmp_path / "out"}", max_steps=2, per_device_train_batch_size=2, report_to="none",
                         use_cpu=True, save_strategy="no")
examples = [{{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}}] * 8
with Publisher(url, base) as publisher:
    model = AutoModelForCausalLM.from_pretrained(base)
    AsyncGRPOTrainer(model, args=args, train_dataset=examples, callbacks=[PublishCallback(publisher)]).train()
print("syncs", [manifest.sync for manifest in Run(url).versions()])
""")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("syncs [2, ")
