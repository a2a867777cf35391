"""Quantities as people read them: three digits and a unit."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Bytes, in powers of 1000: `8.9 GB`."""
    return _scaled(size, ("B", "KB", "MB", "GB", "TB", "PB"))


def count_text(count: float) -> str:
    """A number of weights: `596 M`, `1 T`."""
    return _scaled(count, ("", "K", "M", "B", "T"))


def time_text(seconds: float) -> str:
    """A span of time: `12 ms`, `3.4 s`, `5.6 min`, `2.1 h`."""
    for limit, unit, name in ((1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 3600:.3g} h"


def _scaled(number: float, names: tuple[str, ...]) -> str:
    step = 0
    while number >= 999.5 and step < len(names) - 1:
        number, step = number / 1000, step + 1
    return f"{number:.3g} {names[step]}".rstrip()
