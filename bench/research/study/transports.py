"""How a policy travels from trainer to player: as deltas of a run, or whole at every version."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors.torch import save

from delta_weight_sync import Publisher, RunReader, open_bucket, open_run
from delta_weight_sync.checkpoint import Bits, read_bits, to_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.publish.sharding import Weights
from delta_weight_sync.reader import require_digest

State = dict[str, Bits]


@dataclass(frozen=True)
class Sent:
    """Bytes that a version took, and the digest of its bf16 weights."""

    size: int
    digest: str


class Transport(Protocol):
    """Carries versions in order from 0 on; each is sent once and received once."""

    def send(self, weights: Weights) -> Sent:
        """Send the next version; it has arrived when this returns."""

    def receive(self, version: int) -> State:
        """Return a version's bits, which stay the transport's own."""

    def close(self) -> None:
        """Stop background work."""


class Deltas:
    """Sends deltas of a run in a bucket, like the rest of this project."""

    def __init__(self, bucket: str, base: Path) -> None:
        """`base`: folder of the checkpoint that training starts from."""
        self._url = f"{bucket}#study"
        self._publisher = Publisher(self._url, base)
        self._reader: RunReader | None = None
        self._state: State = {}

    def send(self, weights: Weights) -> Sent:
        """Publish the next version."""
        self._publisher.publish(weights)
        manifest = self._publisher.flush()
        files = manifest.delta or manifest.anchor.files
        return Sent(sum(file.size for file in files), manifest.digest)

    def receive(self, version: int) -> State:
        """Apply the version's delta to the version before."""
        self._reader = self._reader or open_run(self._url)
        manifest = self._reader.manifest(version)
        with tempfile.TemporaryDirectory() as folder:
            if self._state:
                self._reader.apply(self._state, manifest.delta, Path(folder))
            else:
                self._state = self._reader.checkout(manifest, Path(folder))
        require_digest(self._state, manifest)
        return self._state

    def close(self) -> None:
        """Stop publishing."""
        self._publisher.close()


class Whole:
    """Sends all weights at every version, like systems without deltas."""

    def __init__(self, bucket: str, base: Path) -> None:
        """`base` is ignored: every version stands alone."""
        self._bucket, self._sent = open_bucket(bucket, create=True), 0

    def send(self, weights: Weights) -> Sent:
        """Store all weights as one object."""
        tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in weights}
        data = save(tensors)
        self._bucket.put(_key(self._sent), data)
        self._sent += 1
        return Sent(len(data), to_hex(state_digest({name: to_bits(t) for name, t in tensors.items()})))

    def receive(self, version: int) -> State:
        """Read that object."""
        info = self._bucket.stat(_key(version))
        assert info is not None
        with tempfile.TemporaryDirectory() as folder:
            self._bucket.fetch(_key(version), Path(folder) / "model.safetensors", info.size)
            return dict(read_bits(Path(folder)))

    def close(self) -> None:
        """Do nothing: there is no background work."""


def _key(version: int) -> str:
    return f"whole/{version:08d}.safetensors"


TRANSPORTS: dict[str, type[Deltas] | type[Whole]] = {"deltas": Deltas, "whole": Whole}
