"""The objects of a run as HTML, and a delta opened in place."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from delta_weight_sync.protocol import Manifest
from delta_weight_sync.store import Listing, ObjectInfo
from inference_space.dashboard.anatomy import Anatomy
from inference_space.dashboard.templates import render_template

PAGE = 25  # objects of a kind
TENSORS = 2000  # of an opened delta that are listed
KINDS = 16  # that are shown one by one
_OTHERS = "Others"
_KINDS = {
    "": "The run",
    "anchors": "Anchors",
    "deltas": "Deltas",
    "jumps": "Deltas over several versions",
    "manifests": "Manifests",
    "log": "Log",
}


@dataclass(frozen=True)
class _Row:
    key: str
    size: int
    parts: list[str]  # of its name, which may break between them
    delta: int | None  # the version of a delta that can be opened
    download: bool


@dataclass(frozen=True)
class _Group:
    title: str
    objects: Sequence[ObjectInfo]
    rows: list[_Row]


def listing(
    objects: Listing, run: str, page: int, *, served: bool, openable: Collection[int] | None = None
) -> Markup:
    """Page `page` of every kind of object, newest first.

    `served`: there is a server to download from; `openable`: the deltas that can be opened (None: all).
    """
    folder = f"runs/{run}/"
    kinds: dict[str, list[ObjectInfo]] = {kind: [] for kind in _KINDS}
    for info in objects:
        kind = info.key.removeprefix(folder).rpartition("/")[0].partition("/")[0]
        kinds.setdefault(kind if kind in kinds or len(kinds) < KINDS else _OTHERS, []).append(info)

    def rows(found: list[ObjectInfo]) -> list[_Row]:
        newest = sorted(found, key=lambda info: info.key, reverse=True)[page * PAGE : (page + 1) * PAGE]
        return [_row(info, info.key.removeprefix(folder), served, openable) for info in newest]

    groups = [_Group(_KINDS.get(kind, kind), found, rows(found)) for kind, found in kinds.items() if found]
    pages = -(-max((len(group.objects) for group in groups), default=0) // PAGE)
    return render_template("bucket.html", objects=objects, run=run, page=page, pages=pages, groups=groups)


def _row(info: ObjectInfo, name: str, served: bool, openable: Collection[int] | None) -> _Row:
    delta = re.match(r"deltas/(\d{8})", name)
    version = int(delta[1]) if delta and (openable is None or int(delta[1]) in openable) else None
    parts = re.findall(r".*?(?:/|\.t\d+)|.+", name)
    return _Row(info.key, info.size, parts, version, download=served and not name.startswith("anchors/"))


def opened(manifest: Manifest, delta: Anatomy, *, served: bool) -> Markup:
    """A delta in place: what it is, its tensors, and the button that proves its version."""
    return render_template("delta.html", manifest=manifest, delta=delta, served=served, most=TENSORS)
