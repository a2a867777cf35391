"""Exports a run as a static folder: the same views without a server, as files or as a static Space."""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Iterable
from pathlib import Path

from markupsafe import Markup

from delta_weight_sync.errors import CodecError, ObjectMissingError, ProtocolError
from delta_weight_sync.records import Keys, Manifest, RunInfo, parse
from delta_weight_sync.runlog import RunLogReader
from delta_weight_sync.store import Bucket
from inference_space.dashboard import views
from inference_space.dashboard.data import Library, RunView, newest_run
from inference_space.dashboard.html import STATIC, render_template, scripts, styles
from inference_space.dashboard.page import body, render
from inference_space.dashboard.state import Progress, RunState, moments

_PAGES = 8  # of the view Bucket that are exported


def export(bucket: Bucket, run: str | None, folder: Path) -> Path:
    """Write `run`, or the run created last, to `folder`, and return the path of the page.

    Raises `ProtocolError` if the run has no version.
    """
    info = parse(RunInfo, bucket.get(Keys(run).info), Keys(run).info) if run else newest_run(bucket)
    if info is None:
        raise ProtocolError(f"{bucket.url} holds no run yet")
    library = Library(bucket, lambda: info.run)
    frames = _frames(library)
    newest = frames[max(frames)]
    quiet_min = max(0, int((time.time() - newest.last_t) / 60))
    view = RunView(bucket.url, info.run, model=info.model, read=True, progress=newest, quiet_min=quiet_min)
    title = f"Delta Weight Sync: {info.run}"
    page = render_template("export.html", title=title, styles=Markup(styles()), page=render(view))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.js").write_text(f"window.DWS = {json.dumps(_data(library, frames, info))};\n")
    (folder / "dashboard.js").write_text((STATIC / "exported.js").read_text() + scripts())
    readme = (STATIC / "space.md").read_text().format(title=title, run=info.run)
    (folder / "README.md").write_text(readme)
    (folder / "index.html").write_text(page)
    return folder / "index.html"


def _frames(library: Library) -> dict[int, Progress]:
    state, log = RunState(), RunLogReader(library.bucket, library.run)
    state.add(log.poll())
    if log.skipped:
        print(f"{log.skipped} lines of the run's log are left out: they are not valid events")
    state.digests |= library.digests(state.served())
    newest = state.progress()
    if newest is None:
        raise ProtocolError(f"run {library.run!r} in {library.bucket.url} has not published a first version")
    *earlier, last = moments(newest.version)
    return {version: state.at(version, library.digests) for version in earlier} | {last: newest}


def _data(library: Library, frames: dict[int, Progress], info: RunInfo) -> dict[str, object]:
    deltas = {version: delta for version in frames if version and (delta := _delta(library, version))}
    pages = min(_PAGES, -(-len(library.objects()) // views.PAGE))
    listings = (
        views.listing(library.objects(), info.run, page, served=False, openable=deltas)
        for page in range(pages)
    )
    return {
        "moments": list(frames),
        "versions": list(deltas),
        "frames": _packed((version, body(frame)) for version, frame in frames.items()),
        "inside": _packed((version, views.inside(delta)) for version, (_, delta) in deltas.items()),
        "deltas": _packed((version, views.opened(*found, served=False)) for version, found in deltas.items()),
        "bucket": _packed(enumerate(listings)),
        "explain": views.scene(frames[max(frames)], info.model),
    }


def _delta(library: Library, version: int) -> tuple[Manifest, views.OpenedDelta] | None:
    """Open a delta. Returns None if the bucket no longer has all of it."""
    try:
        return library.delta(version)
    except (ObjectMissingError, ProtocolError, CodecError) as error:
        print(f"v{version} is left out: {error}")
        return None


def _packed(pages: Iterable[tuple[int, str]]) -> dict[int, str]:
    return {at: base64.b64encode(gzip.compress(page.encode(), mtime=0)).decode() for at, page in pages}
