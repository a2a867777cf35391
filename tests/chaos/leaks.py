"""What is there of this process: its children, threads, and open files and sockets."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil


def present() -> dict[str, set[str]]:
    """Names of all of it, to be compared with later."""
    me = psutil.Process()
    return {
        "process": {f"{child.pid} {child.name()}" for child in me.children(recursive=True)},
        "thread": {f"{thread.name} {thread.ident}" for thread in threading.enumerate()},
        "file": {f"{number} {_target(number)}" for number in os.listdir("/proc/self/fd")},  # noqa: PTH208
    }


def left(before: dict[str, set[str]]) -> list[str]:
    now = present()
    return sorted(f"{kind}: {name}" for kind in now for name in now[kind] - before[kind])


def unfinished(folder: Path) -> list[str]:
    """Files in a follower's folder that no version needs."""
    found = [*folder.rglob(".*.part"), *folder.glob("*.safetensors")]
    return [str(path.relative_to(folder.parent)) for path in found]


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
    except FileNotFoundError:  # the folder that was listed
        return "gone"
