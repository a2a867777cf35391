"""AdamW updates of a real pretrained model: what the deltas of the benchmarks are made from.

SmolLM2-135M takes a few steps of policy gradient: for a prompt it samples a group of answers, the reward is
the share of different tokens in an answer, the advantage is the reward normalised within its group (GRPO).
Kept are the weights, the direction `u` of the last update (AdamW: w -= lr * u) and the sum of those before
it. The gradients are those of one learning rate; replaying `u` at another one is an approximation.

The weights come out of a 4-bit file: uniform noise of one quantisation step gives them back the spread over
exponents that trained weights have.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.results import SCRATCH
from delta_weight_sync.checkpoint import WEIGHTS
from trainer.policies import smollm2

LEARNING_RATE = 1e-5
_STEPS = 8
_GROUP = 4
_TOKENS = 16
_BLOCK = 32
_UPDATE = "update.safetensors"
_BEFORE = "before.safetensors"
_PROMPTS = (
    "Name three animals that can fly.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "What is 17 plus 25?",
    "Give me a recipe for pancakes.",
    "Who was Marie Curie?",
)
Tensors = dict[str, torch.Tensor]


def weights() -> Tensors:
    """The checkpoint's tensors, bf16."""
    return load_file(folder() / WEIGHTS)


def last() -> Tensors:
    """`u` of the last step, fp16."""
    return load_file(folder() / _UPDATE)


def before_last() -> Tensors:
    """The sum of `u` over the steps before the last one, fp16."""
    return load_file(folder() / _BEFORE)


def folder() -> Path:
    """The checkpoint folder with the updates in it; made at the first call (about a minute)."""
    out = SCRATCH / "smollm2"
    if not out.exists():
        SCRATCH.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=SCRATCH))
        try:
            _make(partial)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def _make(out: Path) -> None:
    source = smollm2.build(SCRATCH / "smollm2-4bit")
    shutil.copytree(source, out, dirs_exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        _smooth(model)
        saved = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
        save_file(saved, out / WEIGHTS, {"format": "pt"})
        _train(model, AutoTokenizer.from_pretrained(source), out)


@torch.no_grad()
def _smooth(model: torch.nn.Module) -> None:
    """Spread each block's few values evenly over the steps between them; end on bf16 values."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            blocks = parameter.view(-1, _BLOCK)
            gaps = blocks.sort(1).values.diff(dim=1)
            step = torch.where(gaps > 0, gaps, torch.inf).min(1, keepdim=True).values.nan_to_num(posinf=0.0)
            blocks += (torch.rand_like(blocks) - 0.5) * step
        parameter.copy_(parameter.to(torch.bfloat16))


def _train(model: Any, tokenizer: Any, out: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    before = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(1, _STEPS + 1):
        loss(model, tokenizer, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found = {name: _direction(optimizer, p) for name, p in model.named_parameters()}
        if step == _STEPS:
            save_file({name: u.half() for name, u in found.items()}, out / _UPDATE)
            save_file({name: total.half() for name, total in before.items()}, out / _BEFORE)
        for name, u in found.items():
            before[name] += u


def loss(model: Any, tokenizer: Any, step: int) -> torch.Tensor:
    """Of one step: a group of answers that the model samples now."""
    chat = [{"role": "user", "content": _PROMPTS[step % len(_PROMPTS)]}]
    asked = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    asked = {key: asked[key].repeat(_GROUP, 1) for key in ("input_ids", "attention_mask")}
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 2}
    with torch.no_grad():
        tokens = model.generate(**asked, min_new_tokens=_TOKENS, max_new_tokens=_TOKENS, **sampling)
    answers = tokens[:, -_TOKENS:]
    reward = torch.tensor([len(set(answer.tolist())) / _TOKENS for answer in answers])
    advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
    logits = model(tokens).logits[:, -_TOKENS - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(2, answers.unsqueeze(2)).squeeze(2)
    return -(advantage.unsqueeze(1) * logprobs).mean()


def _direction(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """AdamW's step without the learning rate, from its state."""
    state = optimizer.state[parameter]
    group = optimizer.param_groups[0]
    (beta1, beta2) = group["betas"]
    step = float(state["step"])
    mean = state["exp_avg"] / (1 - beta1**step)
    return mean / ((state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"])
