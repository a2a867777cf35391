"""vLLM's own HTTP example for RL, with the backend `delta_weight_sync` in place of NCCL.

    export VLLM_SERVER_DEV_MODE=1 VLLM_PLUGINS=delta_weight_sync
    vllm serve Qwen/Qwen3-0.6B --weight-transfer-config '{"backend": "delta_weight_sync"}'
    python docs/examples/vllm_rl.py Qwen/Qwen3-0.6B hf://buckets/me/short#first http://localhost:8000

Trainer and servers share the bucket only. Servers are named by the trainer's calls, and may be several.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

from delta_weight_sync.weight_transfer import DeltaTrainerInitInfo


class EveryServer:
    """Asks several servers, one after the other; vLLM's own HTTP client asks one."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self._clients = [HTTPVLLMWeightSyncClient(url) for url in urls]

    def __getattr__(self, name: str) -> Callable[..., None]:
        def ask(*arguments: Any) -> None:
            for client in self._clients:
                getattr(client, name)(*arguments)

        return ask


def main(policy: str, run: str, *servers: str, updates: int = 10) -> None:
    """Learn random tokens by heart; after each step, every server has the new weights."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(model.config.vocab_size, (4, 32))
    engine = WeightTransferTrainerFactory.trainer_init(
        DeltaTrainerInitInfo(run, base=policy, rank=0),
        client=EveryServer(servers),
        source=ModuleSource(model),
    )
    for update in range(updates):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.send_weights()  # returns when the new weights are live; servers need no pause
        print(f"update {update}: loss {loss:.3f}")
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
