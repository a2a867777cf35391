"""What a late replica fetches: a real run of the shipped policy, joined at version 500.

And what the shortcuts that make it cheap cost the trainer's machine in the background.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from bench.results import ROOT, SCRATCH, Results
from delta_weight_sync import Publisher, codec
from delta_weight_sync.codec import Bits
from delta_weight_sync.publish.shortcuts import Shortcuts
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest

POLICY = ROOT / "trainer" / "policies" / "wordle-tiny"
VERSIONS = 500
LEARNING_RATE = 1.5e-5
# answers to a prompt, tokens of each
_GROUP = 4
_PROMPT = 8
_ANSWER = 8
# weights of the model whose background is timed, and its versions
_LARGE = 1 << 24
_LARGE_STEPS = 130
Step = Callable[[], object]


def run(results: Results) -> dict[str, Any]:
    """Bytes of joining, and seconds of the background."""
    return {"join": _join(), "background": _background()}


def _join() -> dict[str, Any]:
    with _published("joining", POLICY, policy(), VERSIONS) as reader:
        history = {manifest.version: manifest for manifest in reader.versions()}
        newest = history[VERSIONS]
        way = newest.recipe()
        deltas = [history[v].deltas[-1].size for v in range(1, VERSIONS + 1)]
        anchor = sum(file.size for file in way.files) - sum(delta.size for delta in way.deltas)
        names = {"anchor": way.anchor.version if way.anchor else None, "files": len(way.deltas)}
        true = _difference(reader, history, newest.anchor.version, VERSIONS)
        before = _old_rule(deltas, newest.full_bytes)
        return {
            "versions": VERSIONS,
            "learning_rate": LEARNING_RATE,
            "changed": sum(m.changed for m in history.values()) / VERSIONS / newest.total,
            "merged": {f"{n}": _share(history, n) for n in (8, 64)},
            "way": {"bytes": way.size, **names},
            "least": anchor + true,
            "ratio": round(way.size / (anchor + true), 3),
            "anchors_and_deltas": anchor + sum(deltas[before:]),
            "naive": anchor + sum(deltas),
            "stored": {kind: _stored(reader, kind) for kind in ("deltas", "jumps", "anchors", "manifests")},
        }


def policy() -> tuple[torch.nn.Module, Step]:
    """The policy and a step of policy gradient: the reward is the share of different tokens in an answer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def step() -> None:
        asked = torch.randint(2, model.config.vocab_size, (1, _PROMPT)).repeat(_GROUP, 1)
        with torch.no_grad():
            tokens = asked
            for _ in range(_ANSWER):
                chances = model(tokens).logits[:, -1].softmax(-1)
                tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
        answers = tokens[:, _PROMPT:]
        reward = torch.tensor([len(set(answer.tolist())) / _ANSWER for answer in answers])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        logprobs = model(tokens).logits[:, _PROMPT - 1 : -1].log_softmax(-1).gather(2, answers.unsqueeze(2))
        (-(advantage[:, None] * logprobs.squeeze(2)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@contextlib.contextmanager
def _published(
    name: str, base: Path, trained: tuple[torch.nn.Module, Step], versions: int
) -> Iterator[RunReader]:
    """A run of so many versions after the first, as of a trainer whose steps take longer than a jump."""
    model, step = trained
    folder = SCRATCH / name
    shutil.rmtree(folder, ignore_errors=True)
    with Publisher(folder.as_uri(), base) as publisher:
        assert publisher._outbox
        publisher.publish(model.named_parameters())
        for _ in range(versions):
            step()
            publisher.publish(model.named_parameters())
            publisher.flush()
            publisher._outbox.shortcuts.idle(600)
        yield publisher.reader
    shutil.rmtree(folder)


def _difference(reader: RunReader, history: dict[int, Manifest], base: int, version: int) -> int:
    """Bytes of the delta that leads from one version to another at once."""
    old, new = (_state(reader, history[v]) for v in (base, version))
    patches = [codec.diff(name, old[name], new[name]) for name in old]
    return len(codec.encode(patches, old.__getitem__, base=base, version=version))


def _state(reader: RunReader, manifest: Manifest) -> dict[str, Bits]:
    return reader.checkout(manifest, SCRATCH / "joined" / f"{manifest.version}")


def _old_rule(deltas: list[int], full: int) -> int:
    """The newest anchor, were there one after 128 versions or deltas as large as the model, and no jumps."""
    anchor = 0
    chain = 0
    for version, size in enumerate(deltas, 1):
        chain += size
        if chain >= full or version - anchor >= 128:
            anchor = version
            chain = 0
    return anchor


def _share(history: dict[int, Manifest], stride: int) -> float:
    """Of the weights, how many a jump over so many versions changes: the median of those that were made."""
    jumps = {j.key: j for m in history.values() for j in m.jumps if j.version - j.base == stride}
    changed = sorted(jump.changed for jump in jumps.values())
    return changed[len(changed) // 2] / history[0].total


def _stored(reader: RunReader, kind: str) -> int:
    return sum(info.size for info in reader.bucket.list(f"{reader.keys.folder}{kind}/"))


def _background() -> dict[str, Any]:
    """CPU seconds per version of all threads but the trainer's, of a larger model."""
    share, shortcuts = _spent()
    with mock.patch.multiple(Shortcuts, begin=mock.DEFAULT, add=mock.DEFAULT):
        _, alone = _spent()
    spent = {"with": shortcuts, "without": alone}
    return {"weights": _LARGE, "versions": _LARGE_STEPS, "share": share, "cpu_s": spent}


def _spent() -> tuple[float, float]:
    """The share of weights that changed, and seconds; both per version."""
    base = SCRATCH / "background-base"
    base.mkdir(parents=True, exist_ok=True)
    (base / "config.json").write_text("{}")
    torch.manual_seed(0)
    model = torch.nn.Linear(4096, _LARGE // 4096, bias=False)
    torch.nn.init.normal_(model.weight, std=0.02)

    @torch.no_grad()
    def step() -> None:
        model.weight += 4e-7 * torch.randn_like(model.weight)

    started = time.process_time() - time.thread_time()
    with _published("background", base, (model, step), _LARGE_STEPS) as reader:
        spent = time.process_time() - time.thread_time() - started
        changed = sum(manifest.changed for manifest in reader.versions()) / _LARGE_STEPS
    return round(changed / _LARGE, 4), round(spent / _LARGE_STEPS, 4)
