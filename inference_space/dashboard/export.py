"""A run as one static folder: the same views without a server, from `file://` or as a static Space."""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Iterable
from pathlib import Path

from markupsafe import Markup

from delta_weight_sync.codec import CodecError
from delta_weight_sync.keys import Keys
from delta_weight_sync.protocol import Manifest, RunInfo, parse
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.runlog import RunLogReader
from delta_weight_sync.store import Bucket, ObjectMissing
from inference_space.dashboard import browser
from inference_space.dashboard.anatomy import Anatomy
from inference_space.dashboard.data import RunView, newest_run
from inference_space.dashboard.facts import scene
from inference_space.dashboard.inside import inside
from inference_space.dashboard.library import Library
from inference_space.dashboard.page import body, render
from inference_space.dashboard.run_state import RunState
from inference_space.dashboard.snapshots import Snapshots, moments
from inference_space.dashboard.static_files import scripts, styles
from inference_space.dashboard.templates import render_template
from inference_space.dashboard.view import Progress

PAGES = 8  # of the bucket's listing

_SPACE = """---
title: {title}
emoji: 🔁
colorFrom: indigo
colorTo: green
sdk: static
pinned: false
---

The run `{run}` of Delta Weight Sync, as it ended: open `index.html`, or push this folder to a static Space.
"""


def export(bucket: Bucket, run: str | None, folder: Path) -> Path:
    """Write `folder`; returns its page. Raises `ProtocolError` for a run without versions."""
    info = _info(bucket, run)
    library = Library(bucket, lambda: info.run)
    frames = _frames(library)
    newest = frames[max(frames)]
    quiet_min = max(0, int((time.time() - newest.last_t) / 60))
    view = RunView(bucket.url, info.run, model=info.model, read=True, progress=newest, quiet_min=quiet_min)
    title = f"Delta Weight Sync: {info.run}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.js").write_text(f"window.DWS = {json.dumps(_data(library, frames, info))};\n")
    (folder / "dashboard.js").write_text(
        (Path(__file__).parent / "static" / "exported.js").read_text() + scripts()
    )
    (folder / "README.md").write_text(_SPACE.format(title=title, run=info.run))
    index = folder / "index.html"
    index.write_text(render_template("export.html", title=title, styles=Markup(styles()), page=render(view)))
    return index


def _info(bucket: Bucket, run: str | None) -> RunInfo:
    info = parse(RunInfo, bucket.get(Keys(run).info), Keys(run).info) if run else newest_run(bucket)
    if info is None:
        raise ProtocolError(f"{bucket.url} holds no run yet")
    return info


def _frames(library: Library) -> dict[int, Progress]:
    state, snapshots, log = RunState(), Snapshots(), RunLogReader(library.bucket, library.run)
    snapshots.add(state, log.poll())
    if log.skipped:
        print(f"{log.skipped} lines of the run's log are left out: they are no events")
    state.digests |= library.digests(state.served())
    newest = state.progress()
    if newest is None:
        raise ProtocolError(f"run {library.run!r} in {library.bucket.url} has not published a first version")
    *earlier, last = moments(newest.version)
    return {version: snapshots.at(version, library.digests) for version in earlier} | {last: newest}


def _data(library: Library, frames: dict[int, Progress], info: RunInfo) -> dict[str, object]:
    deltas = {version: opened for version in frames if version and (opened := _opened(library, version))}
    pages = -(-len(library.objects()) // browser.PAGE)
    listings = (
        browser.listing(library.objects(), info.run, page, served=False, openable=deltas)
        for page in range(min(PAGES, pages))
    )
    return {
        "moments": list(frames),
        "versions": list(deltas),
        "frames": _packed((version, body(frame)) for version, frame in frames.items()),
        "inside": _packed((version, inside(delta)) for version, (_, delta) in deltas.items()),
        "deltas": _packed((v, browser.opened(*found, served=False)) for v, found in deltas.items()),
        "bucket": _packed(enumerate(listings)),
        "explain": scene(frames[max(frames)], info.model),
    }


def _opened(library: Library, version: int) -> tuple[Manifest, Anatomy] | None:
    """A delta, or None where the bucket does not hold it whole any more: the rest is worth exporting."""
    try:
        return library.delta(version)
    except (ObjectMissing, ProtocolError, CodecError) as error:
        print(f"v{version} is left out: {error}")
        return None


def _packed(pages: Iterable[tuple[int, str]]) -> dict[int, str]:
    """HTML is repetitive: gzip makes it a tenth, and every browser can undo it."""
    return {at: base64.b64encode(gzip.compress(page.encode(), mtime=0)).decode() for at, page in pages}
