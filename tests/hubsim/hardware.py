"""The machines that a Space can ask for, and what an hour of each costs (huggingface.co/pricing)."""

from typing import Any

CPU_BASIC = "cpu-basic"
TWO_DAYS = 48 * 3600  # seconds without a visit after which a Space on cpu-basic sleeps

# flavor -> name, CPUs, memory, GPUs, model of GPU, its memory, US dollars an hour
_FLAVORS: dict[str, tuple[str, str, str, int, str, str, float]] = {
    CPU_BASIC: ("CPU Basic", "2 vCPU", "16 GB", 0, "", "", 0.0),
    "cpu-upgrade": ("CPU Upgrade", "8 vCPU", "32 GB", 0, "", "", 0.03),
    "t4-small": ("Nvidia T4 - small", "4 vCPU", "15 GB", 1, "T4", "16 GB", 0.40),
    "t4-medium": ("Nvidia T4 - medium", "8 vCPU", "30 GB", 1, "T4", "16 GB", 0.60),
    "l4x1": ("1x Nvidia L4", "8 vCPU", "30 GB", 1, "L4", "24 GB", 0.80),
    "l4x4": ("4x Nvidia L4", "48 vCPU", "186 GB", 4, "L4", "96 GB", 3.80),
    "l40sx1": ("1x Nvidia L40S", "8 vCPU", "62 GB", 1, "L40S", "48 GB", 1.80),
    "a10g-small": ("Nvidia A10G - small", "4 vCPU", "15 GB", 1, "A10G", "24 GB", 1.00),
    "a10g-large": ("Nvidia A10G - large", "12 vCPU", "46 GB", 1, "A10G", "24 GB", 1.50),
    "a100-large": ("Nvidia A100 - large", "12 vCPU", "142 GB", 1, "A100", "80 GB", 2.50),
}


def known(flavor: str) -> bool:
    return flavor in _FLAVORS


def catalogue() -> list[dict[str, Any]]:
    """What `list_spaces_hardware` reads."""
    return [_described(flavor) for flavor in _FLAVORS]


def _described(flavor: str) -> dict[str, Any]:
    name, cpu, ram, count, model, vram, dollars = _FLAVORS[flavor]
    accelerator = {
        "type": "gpu",
        "model": model,
        "quantity": str(count),
        "vram": vram,
        "manufacturer": "Nvidia",
    }
    return {
        "name": flavor,
        "prettyName": name,
        "cpu": cpu,
        "ram": ram,
        "accelerator": accelerator if count else None,
        "unitCostMicroUSD": round(dollars / 60 * 1e6),
        "unitCostUSD": dollars / 60,
        "unitLabel": "minute",
    }
