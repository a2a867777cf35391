"""Makes what web/ ships and what docs/watch-in-a-browser.md states.

python -m bench.browser record file:///…/bucket#demo    web/run: a signed run of every fourth of its versions
python -m bench.browser play                            web/test/greedy.json: vLLM's greedy games on it
python -m bench.browser speed                           decoding by Python and by Node, sizes of the page
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from env_space.game import Game, Rules, guesses
from env_space.settings import Settings

WEB = Path(__file__).parents[1] / "web"
POLICY = WEB.parent / "trainer" / "policies" / "wordle-tiny"
RUN = "demo"
GUESS = '<tool_call>\n{"name": "guess", "arguments": {"word": "'
END = '"}}\n</tool_call>'


def record(url: str, every: int) -> None:
    """Publish every `every`-th version of a run anew, signed with a key that nobody keeps."""
    import torch

    from delta_weight_sync import Publisher
    from delta_weight_sync.reader import open_run
    from delta_weight_sync.signing import SIGNING_KEY, SigningKey, new_pair

    folder, source = WEB / "run", open_run(url)
    shutil.rmtree(folder, ignore_errors=True)
    newest = source.manifest().version
    key = new_pair()[SIGNING_KEY]
    options: dict[str, Any] = {"encoding": "small", "state_minutes": 1e9, "signing_key": key}
    with Publisher(f"{folder.as_uri()}#{RUN}", base=POLICY, **options) as publisher:
        for version in range(0, newest + 1, every):
            with tempfile.TemporaryDirectory() as scratch:
                bits = source.checkout(source.manifest(version), Path(scratch))
            weights = {name: torch.from_numpy(b).view(torch.bfloat16) for name, b in bits.items()}
            publisher.publish(weights, version)
            publisher.flush()
    for unused in ("state", "log"):
        shutil.rmtree(folder / "runs" / RUN / unused, ignore_errors=True)
    keys = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    (folder / "keys.json").write_text(json.dumps(keys, indent=0) + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {len(keys)} objects, {size} bytes, signed by {SigningKey(key).public}")


def play(games: int) -> None:
    """Let vLLM play games with held-out words, greedily, with the newest version of web/run."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        # In another process, because this vLLM does not start beside numba's modules.
        command = [
            sys.executable,
            "-m",
            "delta_weight_sync",
            "checkout",
            (WEB / "run").as_uri(),
            "--out",
            folder,
        ]
        subprocess.run(command, check=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        llm = LLM(
            folder, dtype="bfloat16", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20
        )
    rules = Rules(Settings())
    played = [(Game(secret, guesses()), [], []) for secret in rules.held_out[:games]]
    sampling = SamplingParams(temperature=0, max_tokens=7, stop_token_ids=[1, 261], skip_special_tokens=False)
    while open_games := [one for one in played if not one[0].over and len(one[1]) == one[0].turns]:
        prompts = [
            {"prompt_token_ids": tokenizer.encode(_conversation(texts, answers))}
            for _, texts, answers in open_games
        ]
        for (game, texts, answers), output in zip(open_games, llm.generate(prompts, sampling), strict=True):
            texts.append(tokenizer.decode(output.outputs[0].token_ids))
            if texts[-1].startswith(GUESS) and texts[-1].endswith(END):
                answers.append(game.guess(texts[-1][len(GUESS) : -len(END)]).observation)
    rows = [[game.secret, *texts] for game, texts, _ in played]
    short = [[text.removeprefix(GUESS).removesuffix(END) for text in row] for row in rows]
    (WEB / "test" / "greedy.json").write_text(json.dumps(short) + "\n")
    print(f"{sum(game.solved for game, _, _ in played)} of {games} games solved")


def _conversation(texts: list[str], answers: list[str]) -> str:
    turns = [
        f"{text}<|im_end|>\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>"
        for text, answer in zip(texts, answers, strict=True)
    ]
    start = "<|im_start|>assistant\n"
    return "\n".join(["<|im_start|>user\nPlay Wordle.<|im_end|>", *(start + turn for turn in turns), start])


def speed() -> None:
    """Print a row for each mode: one delta of 16.8 million weights, decoded by both, and the page's size."""
    import numpy as np

    from delta_weight_sync import codec
    from delta_weight_sync.digest import state_digest

    rng = np.random.default_rng(0)
    old = (rng.normal(0, 0.02, 1 << 24).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    chance = np.where((old >> 7 & 0xFF) >= 0x78, 0.002, 0.02)  # small weights change more often
    step = np.where(rng.random(old.size) < chance, rng.choice([1, 65535], old.size), 0).astype(np.uint16)
    far = np.where(rng.random(old.size) < 0.6, rng.integers(40, 60, old.size), 0).astype(np.uint16)
    shapes = {"w": old.shape}
    for name, steps, encoding in (("fast", step, "fast"), ("small", step, "small"), ("dense", far, "fast")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "delta")
            patch = codec.diff("w", old, old + steps)
            path.write_bytes(
                codec.encode([patch], {"w": old}.__getitem__, base=0, version=1, encoding=encoding)
            )
            Path(folder, "bits").write_bytes(old.tobytes())
            modes = [group.mode for group in codec.Delta(path).groups]
            decoded = _median_ms(lambda path=path: list(codec.Delta(path).patches(shapes, lambda _: old)))
            command = ["node", str(Path(__file__).with_suffix(".mjs")), folder]
            node = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            digested = _median_ms(lambda: state_digest({"w": old}))
            size = path.stat().st_size
        print(f"{name} {modes} {size / 1e6:.2f} MB, {np.count_nonzero(steps)} changes: decoding Python"
              f" {decoded:.0f} ms, Node {node['decoded']:.0f} ms; digest Python {digested:.0f} ms,"
              f" Node {node['digested']:.0f} ms")  # fmt: skip
    page = [WEB / "index.html", WEB / "style.css", WEB / "icon.svg", *(WEB / "src").glob("*.js")]
    packed = sum(len(gzip.compress(path.read_bytes())) for path in page)
    print(f"page: {sum(path.stat().st_size for path in page)} bytes, {packed} compressed")


def _median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(9):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m bench.browser")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("url")
    recording.add_argument("--every", type=int, default=4)
    playing = commands.add_parser("play")
    playing.add_argument("--games", type=int, default=200)
    commands.add_parser("speed")
    given = vars(parser.parse_args())
    {"record": record, "play": play, "speed": speed}[given.pop("command")](**given)
