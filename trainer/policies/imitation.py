"""Teaches SmolLM2 a task by imitation, before RL: a low-rank change of its weights, small enough to ship.

`python -m bench.policies smollm2` runs this recipe. A policy that has never seen the form of a task earns
nothing on it, and RL cannot improve what always earns nothing. So the policy first sees some right answers:
their form, and a little of how to find them.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from trainer.policies.tokens import PROMPT
from trainer.policies.wordle_policy import NewGame, Teacher, secrets_of
from trainer.tasks import reverse_text
from trainer.tasks.wordle import WordleEnv

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RANK = 8
RATE = 1e-3
STEPS = 100

_OTHER_SEED = 1 << 20  # so that RL with the same seed does not start with the same texts
_TEXTS = 1 << 14
_WARM_UP = 10  # steps

Chat = list[dict[str, Any]]


def reversals(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Chat]:
    """Texts with their right answers."""
    for text in reverse_text.texts(tokenizer, _TEXTS, seed + _OTHER_SEED):
        answer = {"role": "assistant", "content": f"<reversed_text>{text[::-1]}</reversed_text>"}
        yield [*reverse_text.chat(text), answer]


def games(words: list[str], game: NewGame, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Chat]:
    """Games of players that forget nothing; no secret is a held-out word."""
    rng = random.Random(seed)
    teacher = Teacher(words, 1.0, game)
    secrets = secrets_of(words)
    while True:
        chat: Chat = [{"role": "user", "content": PROMPT}]
        for guess in teacher.play(rng.choice(secrets), rng):
            call = {"name": "guess", "arguments": {"word": guess.text}}
            chat.append({"role": "assistant", "content": "", "tool_calls": [{"function": call}]})
            chat.append({"role": "tool", "name": "guess", "content": guess.reply})
        yield [*chat, {"role": "assistant", "content": ""}]


@dataclass(frozen=True)
class Taught:
    """Source of right answers, how many form a batch, and the tools that they call."""

    chats: Callable[[PreTrainedTokenizerBase, int], Iterator[Chat]]
    batch: int
    tools: list[Any]


REVERSE_TEXT = Taught(reversals, 32, [])


def wordle(words: list[str], game: NewGame) -> Taught:
    """The task of playing `game` with `words`, as `read_words` orders them."""
    return Taught(partial(games, words, game), 4, [get_json_schema(WordleEnv.guess)])


def row(tokenizer: PreTrainedTokenizerBase, chat: Chat, tools: list[Any]) -> tuple[list[int], list[int]]:
    """The tokens of a chat, and the positions of those that the policy must write."""
    ids: list[int] = []
    own: list[int] = []
    for number, message in enumerate(chat):
        if message["role"] == "assistant":
            asked, ids = (
                tokenizer.apply_chat_template(
                    messages, tools=tools or None, add_generation_prompt=more, return_dict=False
                )
                for messages, more in ((chat[:number], True), (chat[: number + 1], False))
            )
            own += range(len(asked), len(ids))
    return ids, own


def teach(base: Path, taught: Taught, out: Path, *, seed: int = 0, steps: int = STEPS) -> None:
    """Teach `base` a task and write the adapter to `out`."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = (row(tokenizer, chat, taught.tools) for chat in taught.chats(tokenizer, seed))
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], weight_decay=0.0
    )
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / _WARM_UP + 0.1) * (1 - step / steps)
        loss = _loss(model.get_base_model(), list(itertools.islice(rows, taught.batch)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)
    model.peft_config["default"].base_model_name_or_path = MODEL  # not a folder of this machine
    model.bfloat16().save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink()  # an empty model card


def _loss(model: PreTrainedModel, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean loss over all tokens that the policy writes; shorter rows are padded at the end."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    which, where = torch.tensor([(i, place) for i, (_, own) in enumerate(rows) for place in own]).T
    with torch.autocast("cpu", torch.bfloat16):  # half the time on a CPU that has it
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[which, where - 1])
    return cross_entropy(logits.float(), ids[which, where])
