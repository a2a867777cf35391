"""The objects of a run as HTML, and a delta opened in place."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from html import escape
from urllib.parse import quote

from delta_weight_sync.protocol import Manifest
from delta_weight_sync.store import Listing, ObjectInfo
from inference_space.dashboard.anatomy import Anatomy, Tensor
from inference_space.dashboard.tables import card, row, table
from inference_space.dashboard.words import number, percent, plural, size

PAGE = 25  # objects of a kind
_KINDS = {
    "": "The run",
    "anchors": "Anchors",
    "deltas": "Deltas",
    "manifests": "Manifests",
    "log": "Log",
}


def listing(
    objects: Listing, run: str, page: int, *, served: bool, openable: Collection[int] | None = None
) -> str:
    """Page `page` of every kind of object, newest first.

    `served`: there is a server to download from; `openable`: the deltas that can be opened (None: all).
    """
    folder = f"runs/{run}/"
    groups: dict[str, list[ObjectInfo]] = {kind: [] for kind in _KINDS}
    for info in objects:
        kind = info.key.removeprefix(folder).rpartition("/")[0].partition("/")[0]
        groups.setdefault(kind, []).append(info)
    shown = "".join(
        _group(kind, found, folder, page, served, openable) for kind, found in groups.items() if found
    )
    total = sum(info.size for info in objects)
    pages = -(-max((len(found) for found in groups.values()), default=0) // PAGE)
    about = (
        f'<p class="lead"><b>{size(total)}</b> in {plural(len(objects), "object")} of run {escape(run)}</p>'
    )
    return about + _pager(page, pages) + shown


def _group(
    kind: str,
    found: Sequence[ObjectInfo],
    folder: str,
    page: int,
    served: bool,
    openable: Collection[int] | None,
) -> str:
    newest = sorted(found, key=lambda info: info.key, reverse=True)[page * PAGE : (page + 1) * PAGE]
    rows = "".join(_object(kind, info, folder, served, openable) for info in newest)
    about = f"{plural(len(found), 'object')}, {size(sum(info.size for info in found))}"
    inside = table(("object", "size", ""), rows) if rows else "<p>None on this page.</p>"
    return card(_KINDS.get(kind, escape(kind)), about, inside)


def _object(kind: str, info: ObjectInfo, folder: str, served: bool, openable: Collection[int] | None) -> str:
    name = info.key.removeprefix(folder)
    version = name.removeprefix("deltas/")[:8]
    actions = []
    if kind == "deltas" and version.isdigit() and (openable is None or int(version) in openable):
        actions.append(
            f'<button type="button" data-delta="{int(version)}" aria-expanded="false">Open</button>'
        )
    if served and kind != "anchors":
        words = f'href="dashboard/object?key={quote(info.key)}" download aria-label="Download {escape(name)}"'
        actions.append(f"<a {words}>Download</a>")
    return row((f"<code>{_wrapping(name)}</code>", size(info.size), " ".join(actions)))


def _wrapping(name: str) -> str:
    """A name that breaks where its parts end, if it has to."""
    return re.sub(r"(/|\.t\d+)", r"\1<wbr>", escape(name))


def _pager(page: int, pages: int) -> str:
    if pages <= 1:
        return ""
    newer = _turn(page - 1, "Newer", possible=page > 0)
    older = _turn(page + 1, "Older", possible=page + 1 < pages)
    return f'<p class="pager">{newer}<span>page {page + 1} of {pages}</span>{older}</p>'


def _turn(page: int, word: str, *, possible: bool) -> str:
    return f'<button type="button" data-page="{page}"{"" if possible else " disabled"}>{word}</button>'


def opened(manifest: Manifest, delta: Anatomy, *, served: bool) -> str:
    """A delta in place: what it is, its tensors, and the button that proves its version."""
    ref = manifest.deltas[-1]
    facts = (
        f"v{delta.base} → v{delta.version}",
        f"encoding {delta.encoding}",
        f"{size(ref.size)}, {ref.size / max(1, delta.changes):.2f} bytes per change",
        f"{number(delta.changes)} of {number(manifest.total)} weights changed",
        f"digest <code>{manifest.digest}</code>",
    )
    verify = (
        f'<p><button type="button" data-verify="{delta.version}">Verify v{delta.version}</button>'
        f' <output aria-live="polite"></output></p>'
        if served
        else ""
    )
    tensors = table(("tensor", "shape", "changed", "share", "mode"), "".join(map(_tensor, delta.tensors)))
    return f'<div class="opened"><p>{" · ".join(facts)}</p>{verify}{tensors}</div>'


def _tensor(tensor: Tensor) -> str:
    cells = (
        f"<code>{escape(tensor.name)}</code>",
        "×".join(map(str, tensor.shape)),
        number(tensor.changes),
        percent(tensor.changes / tensor.elements),
        tensor.mode,
    )
    return row(cells)
