"""What the hardware of Spaces costs and holds.

Source: the Hub's documentation, docs/hub/spaces-gpus.md and docs/hub/jobs-pricing.md, read 2026-11-21. It is
billed by the minute while a Space is running; building, sleeping and being paused cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

READ_ON = "2026-11-21"
SOURCE = "https://huggingface.co/docs/hub/spaces-gpus"


@dataclass(frozen=True)
class Hardware:
    """One kind of machine: US dollars per hour, and its GPUs."""

    usd_per_hour: float
    gpus: int = 0
    gpu_gb: int = 0  # memory of each GPU, in 10^9 bytes


# T4 is left out: it has no bf16, and the policy's weights are bf16.
HARDWARE = {
    "cpu-basic": Hardware(0.0),
    "cpu-upgrade": Hardware(0.03),
    "l4x1": Hardware(0.80, 1, 24),
    "l4x4": Hardware(3.80, 4, 24),
    "a10g-small": Hardware(1.00, 1, 24),
    "a10g-large": Hardware(1.50, 1, 24),
    "a10g-largex2": Hardware(3.00, 2, 24),
    "a10g-largex4": Hardware(5.00, 4, 24),
    "l40sx1": Hardware(1.80, 1, 48),
    "l40sx4": Hardware(8.30, 4, 48),
    "l40sx8": Hardware(23.50, 8, 48),
    "a100-large": Hardware(2.50, 1, 80),
    "a100x4": Hardware(10.00, 4, 80),
    "a100x8": Hardware(20.00, 8, 80),
    "rtx-pro-6000": Hardware(2.75, 1, 96),
    "rtx-pro-6000x2": Hardware(5.50, 2, 96),
    "rtx-pro-6000x4": Hardware(11.00, 4, 96),
    "rtx-pro-6000x8": Hardware(22.00, 8, 96),
}
GPUS = tuple(name for name, hardware in HARDWARE.items() if hardware.gpus)


def price(name: str | None) -> float | None:
    """US dollars per hour; None for hardware that is not in the table."""
    return HARDWARE[name].usd_per_hour if name in HARDWARE else None
