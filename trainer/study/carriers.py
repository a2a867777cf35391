"""How a policy travels from trainer to player: as deltas of a run, or whole at every version."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors.torch import save

from delta_weight_sync import Publisher, open_bucket, open_run
from delta_weight_sync.checkpoint import Bits, read_bits, to_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.history import RunReader, require_digest
from delta_weight_sync.publish.sharded import Weights

State = dict[str, Bits]


@dataclass(frozen=True)
class Sent:
    """What a version took on its way, and the digest of its bf16 weights."""

    size: int
    digest: str


class Carrier(Protocol):
    """Versions are sent in order from 0 on, and received in order, each once."""

    def send(self, weights: Weights) -> Sent:
        """The next version; it is there when this returns."""

    def receive(self, version: int) -> State:
        """Its bits; they stay the carrier's own."""


class Deltas:
    """As everywhere in this project: one run in a bucket."""

    def __init__(self, bucket: str, base: Path) -> None:
        """`base`: folder of the checkpoint that training begins with."""
        self._url = f"{bucket}#study"
        self._publisher = Publisher(self._url, base)
        self._reader: RunReader | None = None
        self._state: State = {}

    def send(self, weights: Weights) -> Sent:
        """The next version; it is there when this returns."""
        self._publisher.publish(weights)
        manifest = self._publisher.flush()
        files = manifest.deltas[-1:] or manifest.anchor.files
        return Sent(sum(file.size for file in files), manifest.digest)

    def receive(self, version: int) -> State:
        """Its bits; they stay the carrier's own."""
        self._reader = self._reader or open_run(self._url)
        manifest = self._reader.find(version)
        with tempfile.TemporaryDirectory() as folder:
            if self._state:
                self._reader.advance(self._state, manifest.deltas[-1], Path(folder))
            else:
                self._state = self._reader.checkout(manifest, Path(folder))
        require_digest(self._state, manifest)
        return self._state

    def close(self) -> None:
        """Stop publishing."""
        self._publisher.close()


class Whole:
    """All weights at every version, as systems without deltas send them."""

    def __init__(self, bucket: str, base: Path) -> None:
        """`base` is not needed: every version stands alone."""
        self._bucket, self._sent = open_bucket(bucket, create=True), 0

    def send(self, weights: Weights) -> Sent:
        """The next version; it is there when this returns."""
        tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in weights}
        data = save(tensors)
        self._bucket.put(_key(self._sent), data)
        self._sent += 1
        return Sent(len(data), to_hex(state_digest({name: to_bits(t) for name, t in tensors.items()})))

    def receive(self, version: int) -> State:
        """Its bits; they stay the carrier's own."""
        info = self._bucket.stat(_key(version))
        assert info is not None
        with tempfile.TemporaryDirectory() as folder:
            self._bucket.fetch(_key(version), Path(folder) / "model.safetensors", info.size)
            return dict(read_bits(Path(folder)))

    def close(self) -> None:
        """Nothing runs in the background."""


def _key(version: int) -> str:
    return f"whole/{version:08d}.safetensors"


CARRIERS: dict[str, type[Deltas] | type[Whole]] = {"deltas": Deltas, "whole": Whole}
