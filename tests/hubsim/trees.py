"""Folders, which neither repositories nor buckets really have: made from the slashes in the paths."""

from collections.abc import Iterable


def folders(paths: Iterable[str]) -> set[str]:
    """Every folder that some path lies in, at any depth."""
    found = set()
    for path in paths:
        parts = path.split("/")[:-1]
        found |= {"/".join(parts[: depth + 1]) for depth in range(len(parts))}
    return found


def listing(paths: Iterable[str], folder: str, *, recursive: bool) -> list[str]:
    """What lies in `folder` ("" is the root), files and folders, sorted; with `recursive` at any depth."""
    inside = f"{folder}/" if folder else ""
    everything = {*paths} | folders(paths)
    below = [path for path in everything if path.startswith(inside) and path != folder]
    return sorted(path for path in below if recursive or "/" not in path[len(inside) :])
