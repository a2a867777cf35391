"""The learning rate at each version, as the trainer logged it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from delta_weight_sync.history import RunReader
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.runlog import RunLogReader, StepEvent

_METRIC = "learning_rate"


def rates(reader: RunReader, manifests: Sequence[Manifest]) -> dict[int, float]:
    """Version -> the rate that was logged last before it was handed over; without those before the first."""
    events = RunLogReader(reader.bucket, reader.keys.run).poll()
    steps = [event for event in events if isinstance(event, StepEvent) and _METRIC in event.metrics]
    times = [step.t for step in steps]
    before = {manifest.version: bisect_right(times, manifest.created_at) for manifest in manifests}
    return {version: steps[count - 1].metrics[_METRIC] for version, count in before.items() if count}
