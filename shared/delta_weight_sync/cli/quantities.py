"""Quantities as people write them in a command: `1T` weights, `1%`, `100MB/s`."""

from __future__ import annotations

import argparse
import re

_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_NUMBER = r"(\d+(?:\.\d+)?)"


def weights(text: str) -> int:
    """A number of weights: `1T`, `0.6B`, `135M`, `240K`, `1000000`."""
    match = re.fullmatch(_NUMBER + "([KMBT]?)", text)
    if not match or not (count := round(float(match[1]) * _COUNTS[match[2]])):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of weights: write 1T, 0.6B, 135M or 240K")
    return count


def share(text: str) -> float:
    """A share in percent, as a number from 0 to 1: `1%`, `0.3%`."""
    match = re.fullmatch(_NUMBER + "%", text)
    if not match or not 0.0001 <= (found := float(match[1]) / 100) <= 0.3:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share that this model knows: write a percentage from 0.01% to 30%, such as 1%"
        )
    return found


def speed(text: str) -> float:
    """A link in bytes per second: `100MB/s`, `1GB/s`; with a small b bits: `10Gb/s`."""
    match = re.fullmatch(_NUMBER + "([KMGT]?)([Bb])/s", text)
    if not match or not (found := float(match[1]) * _SIZES[match[2]] / (1 if match[3] == "B" else 8)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no speed of a link: write bytes as 100MB/s or 1GB/s, bits as 10Gb/s"
        )
    return found


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on: write digits only")
    return int(text)


def dollars(text: str) -> float:
    """Dollars per gigabyte: `0.09`."""
    if not re.fullmatch(_NUMBER, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no price: write dollars per gigabyte, such as 0.09")
    return float(text)
