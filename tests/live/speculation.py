"""A program for test_speculation.py: an engine of vLLM that decodes speculatively takes commits.

    python -m tests.live.speculation <folder> <speculative configuration, as JSON>

The folder holds the checkpoints `base` and `next`, and deltas that lead from one to the other, with
their digests in `versions.json`. Prints one line of JSON.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from delta_weight_sync.vllm.drafts import read_counts
from tests.live.engine import Engine, facts, state_digest, to_hex

PROMPTS = [[5 + i, 6, 7] * 4 for i in range(6)]
OPTIONS = {"skip_tokenizer_init": True, "disable_log_stats": False}  # without statistics, vLLM counts nothing


def ask(engine: Engine) -> dict[str, Any]:
    """Greedy tokens for all prompts, and the share of draft tokens that vLLM accepted meanwhile."""
    before = read_counts({"method": "any"})
    engine.forget()
    outputs = [engine.until(engine.ask(prompt, 24)) for prompt in PROMPTS]
    after = read_counts({"method": "any"})
    drafted = after.drafted - before.drafted
    accepted = after.accepted - before.accepted
    return {"tokens": [tokens(output) for output in outputs], "acceptance": accepted / drafted}


def tokens(output: Any) -> list[int]:
    return [token for token, _ in facts(output)["logprobs"]]


def draft_of(engine: Engine) -> str:
    """The digest of the draft's parameters; "" if it has none."""
    draft = engine.core.model_executor.driver_worker.worker.model_runner.get_draft_model()
    if draft is None:
        return ""
    named = {name: parameter.detach().reshape(-1) for name, parameter in draft.named_parameters()}
    return to_hex(
        state_digest({n: p.view(dtype=torch.int16).numpy().view("uint16") for n, p in named.items()})
    )


def main(folder: Path, config: dict[str, Any]) -> None:
    gc.freeze()  # vLLM collects garbage at each start, which would go through all that was imported
    engine = Engine(folder / "base", speculative_config=config, **OPTIONS)
    found: dict[str, Any] = {"learned": engine.call("learn", shapes=engine.shapes)}
    found["before"] = ask(engine)
    runs = engine.ask(PROMPTS[0], 200)
    engine.until(runs, 8)
    for number, (delta, digest) in enumerate(json.loads((folder / "versions.json").read_text())):
        engine.take(digest, str(number), deltas=[str(folder / delta)])
        engine.step()
    found["beside"] = len(tokens(engine.until(runs)))
    found["after"] = ask(engine)
    found["draft"] = draft_of(engine)
    engine.core.shutdown()

    fresh = Engine(folder / "next", speculative_config=config | {"model": str(folder / "next")}, **OPTIONS)
    found["fresh"] = ask(fresh) | {"draft": draft_of(fresh)}
    fresh.core.shutdown()
    plain = Engine(folder / "next", skip_tokenizer_init=True)
    found["plain"] = [tokens(plain.until(plain.ask(prompt, 24))) for prompt in PROMPTS]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
