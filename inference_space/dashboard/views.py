"""The dashboard's tabs Inside a delta, Bucket and Explain."""

import math
import random
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from delta_weight_sync.codec import Bits, Delta, TensorRow, header_size
from delta_weight_sync.errors import CodecError
from delta_weight_sync.records import POLL_S, Manifest
from delta_weight_sync.store import Listing, ObjectInfo
from delta_weight_sync.util import size_text
from inference_space.dashboard.html import render_template
from inference_space.dashboard.state import Progress

FAR = 5  # units of the last place (ULPs); larger moves count as `FAR`
# Limits, because the bucket may be hostile and the model's size is unknown here.
MAX_TABLE = 4 << 20  # limit in bytes of the header of a delta's part, enough for some 50,000 tensors
MAX_DECODE = 64 << 20  # bytes; a larger part of a delta is not decoded for a picture
MAX_NUMBERS = 1 << 23  # a part with more changes (in modes other than `gaps`: elements) is not decoded
PAGE = 25  # objects of each kind on a page of the view Bucket
_STAND_ALONE = {"gaps", "mask", "dense"}  # modes that decode without the old weights
# limits: cells of the heat map, tensors outside of the map
_MAX_CELLS = 20_000
_MAX_REST = 200
MAX_TENSORS = 2000  # tensors of an opened delta that the page lists
_MAX_KINDS = 16  # folders of a run that are listed separately; the rest is listed together
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d{1,6})\.(.+)")
_KINDS = ("", "anchors", "deltas", "jumps", "manifests", "log", "heads", "state")  # in the page's order


@dataclass(frozen=True)
class OpenedDelta:
    base: int
    version: int
    modes: tuple[str, ...]  # of each group of tensors
    tensors: Sequence[TensorRow]
    ulps: dict[int, int] | None  # number of elements by signed distance, clipped to ±`FAR`; None: see `why`
    why: str  # reason why `ulps` is None

    @property
    def changes(self) -> int:
        return sum(tensor.changes for tensor in self.tensors)

    @property
    def encoding(self) -> str:
        """The encoding, as far as the modes tell it: both encodings may use `mask`, `dense` and `raw`."""
        return "small" if "bands" in self.modes else "fast" if "gaps" in self.modes else "fast or small"


def open_delta(paths: Iterable[Path]) -> OpenedDelta:
    """Read a delta from its parts. If they are small and need no old weights, decode how far weights moved.
    Raises `CodecError` if a file is not a delta, or lists too many tensors."""
    tensors = list[TensorRow]()
    modes = list[str]()
    why = ""
    distances = np.zeros(2 * FAR + 1, np.int64)  # elements that moved by -FAR, ..., FAR
    for path in paths:
        if header_size(path) > MAX_TABLE:
            raise CodecError(f"{path.name} has a header of more than {size_text(MAX_TABLE)}: not opened here")
        delta = Delta(path)
        rows = [row._replace(group=len(modes) + row.group) for row in delta.tensors]
        tensors += rows
        modes += [group.mode for group in delta.groups]
        # Decoding takes 14 bytes for each change or, in modes other than `gaps`, for each element.
        numbers = sum(row.changes if modes[row.group] == "gaps" else row.numel for row in rows)
        if path.stat().st_size > MAX_DECODE or numbers > MAX_NUMBERS:
            why = "This delta is too large to be decoded for a picture."
        elif needing := sorted(set(modes) - _STAND_ALONE):
            why = f"Only a replica has the old weights that decoding needs (mode {' and '.join(needing)})."
        if not why:
            shapes = {row.name: row.shape for row in rows}
            no_weights = dict[str, Bits]()
            for patch in delta.patches(shapes, no_weights.__getitem__):
                moved = np.clip(patch.ulps.view(np.int16), -FAR, FAR)
                distances += np.bincount(moved + FAR, minlength=distances.size)
    ulps = {at - FAR: count for at, count in enumerate(distances.tolist()) if count}
    return OpenedDelta(delta.base, delta.version, tuple(modes), tensors, None if why else ulps, why)


class Cell(NamedTuple):
    changes: int
    elements: int


def tensor_map(tensors: Iterable[TensorRow]) -> dict[tuple[str, int | None], Cell]:
    """Add up changes by kind of tensor and layer. The layer is None for tensors outside the layers."""
    cells: dict[tuple[str, int | None], Cell] = {}
    for tensor in tensors:
        name = tensor.name.removesuffix(".weight")
        match = _LAYER.fullmatch(name)
        kind = re.sub(r"\.\d+\.", ".*.", match[2]) if match else name.removeprefix("model.")
        place = kind, int(match[1]) if match else None
        changes, elements = cells.get(place, (0, 0))
        cells[place] = Cell(changes + tensor.changes, elements + tensor.numel)
    return cells


def inside(delta: OpenedDelta) -> Markup:
    """Render a delta: a heat map of its changes by layer and kind of tensor, and how far weights moved."""
    cells = tensor_map(delta.tensors)
    layers = sorted({layer for _, layer in cells if layer is not None})
    kinds = list(dict.fromkeys(kind for kind, layer in cells if layer is not None))
    heat = None
    if 0 < len(kinds) * len(layers) <= _MAX_CELLS:
        shares = [cell.changes / cell.elements for (_, layer), cell in cells.items() if layer is not None]
        low = min(shares)
        high = max(shares)

        def place(share: float) -> float:
            """Return where `share` lies between `low` and `high` on a logarithmic scale: 0 to 1."""
            return math.log(share / low) / math.log(high / low) if high > low else 1.0

        heat = {"layers": layers, "kinds": kinds, "low": low, "high": high, "place": place}
    rest = [(kind, cell) for (kind, layer), cell in cells.items() if layer is None][:_MAX_REST]
    return render_template("inside.html", delta=delta, cells=cells, heat=heat, rest=rest, far=FAR)


def opened(manifest: Manifest, delta: OpenedDelta, *, served: bool) -> Markup:
    """Render a delta that was opened in the listing."""
    return render_template("delta.html", manifest=manifest, delta=delta, served=served, most=MAX_TENSORS)


def can_download(name: str) -> bool:
    """Whether visitors may download an object of a run: no whole weights, and no trainer state."""
    return re.match(r"(run\.json$|(deltas|jumps|manifests|heads|log)/)", name) is not None


def by_kind(objects: Listing, run: str) -> dict[str, list[ObjectInfo]]:
    """Group a run's objects by kind: the name of their folder in the run, or "" outside of the folders."""
    kinds: dict[str, list[ObjectInfo]] = {kind: [] for kind in _KINDS}
    for info in objects:
        kind = info.key.removeprefix(f"runs/{run}/").rpartition("/")[0].partition("/")[0]
        kinds.setdefault(kind if kind in kinds or len(kinds) < _MAX_KINDS else "Others", []).append(info)
    return kinds


def page_count(kinds: dict[str, list[ObjectInfo]]) -> int:
    """Return how many pages a listing has: enough for the kind with the most objects."""
    return -(-max(map(len, kinds.values())) // PAGE)


def listing(objects: Listing, run: str, page: int, openable: Collection[int] | None = None) -> Markup:
    """Render page `page`, counted from 0, of the run's objects by kind, newest first.

    `openable`: versions whose deltas can be opened. On the live page, `openable` is None: then all deltas can
    be opened, and objects that visitors may download have a link.
    """
    kinds = by_kind(objects, run)
    pages = page_count(kinds)

    def row(info: ObjectInfo) -> dict[str, object]:
        name = info.key.removeprefix(f"runs/{run}/")
        delta = re.match(r"deltas/(\d{8})", name)
        can_open = delta and (openable is None or int(delta[1]) in openable)
        return {
            "key": info.key,
            "size": info.size,
            "parts": re.findall(r".*?(?:/|\.t\d+)|.+", name),  # a line may break between parts
            "delta": int(delta[1]) if delta and can_open else None,
            "download": openable is None and can_download(name),
        }

    page = max(0, min(page, pages - 1))
    groups = []
    for kind, found in kinds.items():
        newest = sorted(found, key=lambda info: info.key, reverse=True)[page * PAGE : (page + 1) * PAGE]
        if found:
            groups.append({"kind": kind, "objects": found, "rows": [*map(row, newest)]})
    return render_template("bucket.html", objects=objects, run=run, page=page, pages=pages, groups=groups)


@dataclass(frozen=True)
class Facts:
    """Measurements of a run or an example. `static/formulas.js` computes everything else from them."""

    label: str
    full_bytes: float
    delta_bytes: float  # median
    changed: float  # share of the weights that a version changes, 0 to 1
    weights: int
    step_s: float  # between two versions
    diff_s: float  # the trainer waits for this
    encode_s: float
    stage_s: float
    pause_s: float  # generation waits for this
    poll_s: float
    anchor_every: int  # versions from one anchor (a stored checkpoint) to the next


# Qwen3-0.6B with 0.99 % of its weights changed per sync; the encoding `fast` takes 1.25 bytes per change.
EXAMPLE = Facts("Qwen3-0.6B", 1.192e9, 7.36e6, 0.0099, 596_049_920, 8.0, 0.25, 0.3, 0.2, 0.02, POLL_S, 50)
LINK = 100e6  # bytes per second of an assumed network link, for a model of the example's size
_GRID = 24, 14  # columns and rows of weights


def facts_of(run: Progress | None, model: str | None) -> Facts | None:
    """Return what `run` measured; None before the run has a delta and a commit."""
    if run is None or not run.payload_bytes or run.pause_ms is None or run.step_s is None:
        return None
    syncs = [(sync, slow) for sync, slow in run.syncs if sync.version]
    return replace(
        EXAMPLE,
        label=model or "this run",
        full_bytes=run.full_bytes,
        delta_bytes=run.payload_bytes,
        changed=run.curves["changed"][-1][1],
        weights=run.syncs[0][0].total,
        step_s=run.step_s,
        diff_s=median([sync.diff_s for sync, _ in syncs] or [0.0]),
        encode_s=median([sync.encode_s for sync, _ in syncs] or [0.0]),
        stage_s=median([slow.stage_s for _, slow in syncs if slow] or [0.0]),
        pause_s=run.pause_ms / 1000,
        anchor_every=max(2, round(run.anchor_every or EXAMPLE.anchor_every)),
    )


def scene(run: Progress | None, model: str | None) -> dict[str, Any]:
    """Return the numbers behind the animations, for JSON."""
    measured = facts_of(run, model)
    facts = [asdict(found) for found in (measured, EXAMPLE) if found]
    for found in facts:  # a smaller model gets a slower link: all its weights take as long as EXAMPLE's
        found["link"] = min(LINK, LINK * found["full_bytes"] / EXAMPLE.full_bytes)
    chance = random.Random(7)
    cells = range(_GRID[0] * _GRID[1])
    grid = {
        "weights": [chance.gauss(0, 0.02) for _ in cells],
        "masters": [chance.uniform(-0.5, 0.5) for _ in cells],  # offset from the bf16 value, in ULPs
        "updates": [chance.choice((-1, 1)) * chance.uniform(0.3, 1.0) for _ in cells],
    }
    return {"facts": facts, "measured": bool(measured), "columns": _GRID[0], "grid": grid}
