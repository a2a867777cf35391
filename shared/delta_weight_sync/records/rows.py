"""How the JSON of a manifest names its files: as rows without the keys, which a reader computes.

docs/wire-format.md describes the rows.
"""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from delta_weight_sync.records.files import DeltaRef, FileRef
from delta_weight_sync.records.keys import LINK
from delta_weight_sync.records.limits import MAX_ASSETS, MAX_PARTS, MAX_REFS

_WRITER_NAME = re.compile(r"t\d{1,18}-[0-9a-f]{8}")
_PART_NAME = re.compile(r"r\d{1,9}")


def anchor_rows(files: Iterable[FileRef], folder: str, usual: str) -> list[list[Any]]:
    """Write the files of an anchor below `folder`, where `usual` is the name of the version's own anchor."""
    rows = []
    for file in files:
        place, _, name = file.key.removeprefix(folder).partition("/")
        rows.append([name, file.size, file.sha256, *([place] if place != usual else [])])
    return rows


def full_anchor(anchor: Any, folder: str, writer: str) -> dict[str, Any]:
    """Read the anchor of a manifest: add the keys of its files."""
    rows = anchor.get("files") if isinstance(anchor, dict) else None
    if not isinstance(rows, list):
        raise ValueError("the anchor is not {version, files}")
    files = []
    for row in rows[: MAX_ASSETS + 1]:
        texts = [row[0], *row[3:]] if isinstance(row, list) and len(row) in (3, 4) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a file of the anchor is {str(row)[:100]}, not [name, size, sha256]")
        place = row[3] if len(row) == 4 else f"{anchor.get('version')!s:0>8}.{writer}"
        files.append({"key": f"{folder}{place}/{row[0]}", "size": row[1], "sha256": row[2]})
    return {**anchor, "files": files}


def link_rows(links: Iterable[DeltaRef], writer: str) -> list[list[Any]]:
    """Write the deltas or jumps of a manifest by `writer`, a row for all parts of one."""
    rows = []
    for (base, version), group in groupby(links, key=lambda link: (link.base, link.version)):
        parts = list(group)
        found = [LINK.search(part.key) for part in parts]
        writers = {match[1] for match in found if match}
        if None in found or len(writers) > 1:
            raise ValueError(f"{parts[0].key} is not the key of a delta or a jump of one writer")
        sizes = {match[2]: part.size for match, part in zip(found, parts, strict=True) if match}
        size = sizes.get(None, sizes)
        other = sorted(writers - {writer})
        rows.append([base, version, parts[0].changed, size, parts[0].sha256, *other])
    return rows


def full_links(rows: Any, folder: str, writer: str) -> list[dict[str, Any]]:
    """Read the deltas or jumps of a manifest: one object with a key for each file."""
    if not isinstance(rows, list):
        raise ValueError(f"{folder} is not a list")
    full: list[dict[str, Any]] = []
    for row in rows:
        shown = str(row)[:100]
        if not isinstance(row, list) or len(row) not in (5, 6):
            raise ValueError(f"a delta is {shown}, not [base, version, changed, size, sha256]")
        base, version, changed, size, sha256, *other = row
        numbers = [base, version]
        if any(type(number) is not int or not 0 <= number < 10**18 for number in numbers):
            raise ValueError(f"the versions of a delta are wrong: {shown}")
        owner = other[0] if other else writer
        if not isinstance(owner, str) or not _WRITER_NAME.fullmatch(owner):
            raise ValueError(f"the writer of a delta is wrong: {shown}")
        sizes = size if isinstance(size, dict) else {"": size}
        named = all(_PART_NAME.fullmatch(part) for part in sizes if isinstance(size, dict))
        if isinstance(size, dict) and not (named and 1 <= len(size) <= MAX_PARTS):
            raise ValueError(f"the parts of a delta are not 1 to {MAX_PARTS} named sizes: {shown}")
        if len(full) + len(sizes) > MAX_REFS:
            raise ValueError(f"{folder} has more than {MAX_REFS} files")
        start = f"{base:08d}-" if folder.endswith("jumps/") else ""
        common = {"sha256": sha256, "base": base, "version": version, "changed": changed, "parts": len(sizes)}
        for part, each in sizes.items():
            name = f"{start}{version:08d}.{owner}{f'.{part}' if part else ''}.safetensors"
            full.append({"key": f"{folder}{name}", "size": each, **common})
    return full
