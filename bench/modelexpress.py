"""Both sides of ModelExpress, by its own functions; what they need of its clients stands in.

Its trainer keeps the last weights in memory. Its replica changes a checkpoint file on its own disk,
memory-mapped, and has vLLM load that; the loading is not measured.
"""

from types import SimpleNamespace

import numpy as np
from modelexpress_rl.inference.receiver import _LocalCheckpoint
from modelexpress_rl.train.methods.canonical_delta import CanonicalDeltaPublicationMethod
from modelexpress_rl.utils import index_checkpoint_tensors, make_tensor_reader
from safetensors.numpy import save
from safetensors.torch import save_file

from bench.model import Model, bf16_tensors
from bench.results import SCRATCH
from delta_weight_sync.codec import Bits

_CHECKSUM = "adler32"
_INDEX = {"checksum_format": _CHECKSUM, "compression_format": "zstd"}


class ModelExpress:
    """A trainer's memory, the last version's shard, and a replica's checkpoint."""

    def __init__(self, old: dict[str, Bits]) -> None:
        snapshot = {name: bits.reshape(-1).view(np.uint8).copy() for name, bits in old.items()}
        self._trainer = SimpleNamespace(snapshot=snapshot, _checksum_format=_CHECKSUM)
        SCRATCH.mkdir(parents=True, exist_ok=True)
        self._checkpoint = SCRATCH / "modelexpress.safetensors"
        save_file(bf16_tensors(old), self._checkpoint)
        self._replica = SimpleNamespace(locations=index_checkpoint_tensors(self._checkpoint)[1])
        self._changed: list[str] = []
        self.shard = b""

    def publish(self, model: Model) -> None:
        """Tensors to a shard; they become what the next version is compared with."""
        bucket = list(model.live())
        found = CanonicalDeltaPublicationMethod._process_bucket(self._trainer, bucket)
        self._trainer.snapshot, encoded, checksums = found[:3]
        self._changed, self.shard = list(encoded), save(encoded, metadata=checksums)

    def receive(self) -> None:
        """The shard into the checkpoint."""
        shards = {"model.safetensors": (self.shard, self._changed)}
        _LocalCheckpoint._apply_shards(self._replica, shards, index_metadata=_INDEX)

    def holds(self, weights: dict[str, Bits]) -> bool:
        """True if these are the checkpoint's weights."""
        read, _ = make_tensor_reader(self._checkpoint)
        return all(np.array_equal(read(name), b.reshape(-1).view(np.uint8)) for name, b in weights.items())
