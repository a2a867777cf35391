"""One replica for all tests that only need some replica, with a key and secrets. They share a process of the
suite, in this order, as the last of them leave it broken.
"""

from collections.abc import Iterator

import pytest

from delta_weight_sync.signing import PUBLIC_KEY, new_pair
from tests.live.replica import KEY, SMALL_CACHE, Replica
from tests.live.run import Trainer, training

TOKEN = "hf_plantedToken"
BLOCK = 32  # the smallest that vLLM's CPU kernels like; prefixes are shared in whole blocks
CONTEXT = 2048
PAIR = new_pair()
SETTINGS = {
    PUBLIC_KEY: PAIR[PUBLIC_KEY],
    "REPLICA_KEY": KEY,
    "REPLICA_VLLM_ARGS": f"{SMALL_CACHE} --block-size {BLOCK} --enable-prompt-tokens-details",
    "HF_TOKEN": TOKEN,
    "AWS_SECRET_ACCESS_KEY": TOKEN,
}


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """It has published version 0 of the run "live"."""
    with training(tmp_path_factory.mktemp("trainer"), keys=PAIR) as trainer:
        yield trainer


@pytest.fixture(scope="session")
def replica(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """It serves whatever the trainer published last."""
    folder = tmp_path_factory.mktemp("replica")
    with Replica(trainer.bucket.url, "live", folder, max_model_len=CONTEXT, environ=SETTINGS) as replica:
        replica.wait_for(0)
        yield replica
