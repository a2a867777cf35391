"""What stacked experts cost a trainer: hand-over time and memory, against the same weights unstacked.

    python -m bench.stacks

transformers 5 keeps the experts of a layer in one parameter; the checkpoint has a tensor for each expert. A
publisher compares the stack as it lies in memory. Each way runs in a process of its own, in turns.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_LAYERS = 8
_EXPERTS = 64
_ROUNDS = 3
_SYNCS = 12
_STATM = Path("/proc/self/statm")  # pages: the second number is the resident set


def main() -> None:
    """Print a line for each way: the shortest hand-over, and most megabytes in memory; medians of rounds."""
    measured: dict[str, list[tuple[float, float]]] = {"stacked": [], "unstacked": []}
    for _ in range(_ROUNDS):
        for way, figures in measured.items():
            command = [sys.executable, "-m", "bench.stacks", way]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            hand_over, memory = map(float, done.stdout.split())
            figures.append((hand_over, memory))
    medians = {
        way: [statistics.median(column) for column in zip(*measured[way], strict=True)] for way in measured
    }
    for way, (hand_over, memory) in medians.items():
        print(f"{way}: a hand-over takes {1e3 * hand_over:.0f} ms, memory {memory:.0f} MB")
    ratios = [a / b for a, b in zip(medians["stacked"], medians["unstacked"], strict=True)]
    print(f"stacked / unstacked: time {ratios[0]:.2f}, memory {ratios[1]:.2f}")


def measure(way: str) -> None:
    """Publish a mixture of experts of 108 M weights; print seconds and megabytes."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import torch
    import transformers
    from safetensors.torch import load_file

    from delta_weight_sync import Publisher
    from delta_weight_sync.checkpoint import WEIGHTS

    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=128,
        num_experts=_EXPERTS,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        folder = Path(scratch)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained(folder / "base")
        weights = dict(model.named_parameters())
        if way == "unstacked":
            weights = {n: torch.nn.Parameter(t) for n, t in load_file(folder / "base" / WEIGHTS).items()}
        del model
        times = list[float]()
        most = 0.0
        with Publisher(f"{(folder / 'bucket').as_uri()}#run", folder / "base") as publisher:
            publisher.publish(weights)
            for sync in range(_SYNCS):
                publisher.flush()
                for tensor in weights.values():
                    tensor.view(-1)[sync::97] *= 1.01
                started = time.perf_counter()
                publisher.publish(weights.items())
                times.append(time.perf_counter() - started)
                resident = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                most = max(most, resident / 1e6)
    print(min(times), most)  # other work on the machine only adds time


if __name__ == "__main__":
    measure(sys.argv[1]) if sys.argv[1:] else main()
