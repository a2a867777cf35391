"""With which weights a trainer starts that publishes to a run with earlier versions, but resumed no state."""

import contextlib
import itertools
import logging
from typing import Final

from delta_weight_sync import errors
from delta_weight_sync.checkpoint import Specs
from delta_weight_sync.digest import tensor_digest, to_hex
from delta_weight_sync.publish.base import Base
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Manifest, RunInfo, parse

_LOOK_BACK: Final = 100  # how many versions are read to find the one with the trainer's weights
_log = logging.getLogger("delta_weight_sync")


def untrained_digest(reader: RunReader, start: Base | None, specs: Specs) -> str:
    """The digest of version 0; "" if neither the run nor the checkpoint `start` tells it.

    Args:
        reader: The run.
        start: The checkpoint that was given as `base`.
        specs: The tensors of the run's versions.
    """
    with contextlib.suppress(errors.ProtocolError):
        return reader.manifest(0).digest
    # Its manifest was deleted. `start` is as good if the run began with it: not if it is a later checkout.
    with contextlib.suppress(errors.ProtocolError, errors.ObjectMissingError, errors.CheckpointError):
        info = parse(RunInfo, reader.bucket.get(reader.keys.info), reader.keys.info)
        stored = start.checkpoint if start and start.name == info.model else None
        if stored and specs and specs.keys() <= stored.specs.keys():
            words = ((name, stored.read(name, spec.dtype)) for name, spec in specs.items())
            return to_hex(sum(itertools.starmap(tensor_digest, words)))
    return ""


def log_start(reader: RunReader, newest: Manifest, digest: str) -> None:
    """Log which version has the weights, of digest `digest`, that follow `newest`."""
    run = reader.keys.run
    if digest == newest.digest:
        _log.info("run %r continues from version %d", run, newest.version)
        return
    same = _find(reader, newest, digest)
    if same:
        _log.warning(
            "run %r goes back from version %d (sync %d) to the weights of version %d (sync %d), with which"
            " this trainer starts: the next version holds them",
            *(run, newest.version, newest.sync, same.version, same.sync),
        )
    else:
        _log.warning(
            "run %r has versions up to %d, but this trainer resumed no state: the next version holds the"
            " weights with which this trainer starts; for a separate run, choose another name",
            *(run, newest.version),
        )


def _find(reader: RunReader, newest: Manifest, digest: str) -> Manifest | None:
    """The newest version with this digest, among the last ones that can be read."""
    manifest: Manifest | None = newest
    with contextlib.suppress(errors.DeltaWeightSyncError):
        for _ in range(_LOOK_BACK):
            if manifest is None or manifest.digest == digest:
                return manifest
            manifest = reader.parent(manifest)
    return None
