"""Exports a run's dashboard as static files, to open without a server or to upload as a static Space."""

import base64
import gzip
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from markupsafe import Markup

from delta_weight_sync.errors import CodecError, ObjectMissingError, ProtocolError
from delta_weight_sync.records import Keys, Manifest, RunInfo, parse, version_key
from delta_weight_sync.runlog import RunLogReader
from delta_weight_sync.signing import PUBLIC_KEY
from delta_weight_sync.store import Bucket
from delta_weight_sync.util import size_text
from inference_space.dashboard import views
from inference_space.dashboard.data import Library, RunView, newest_run
from inference_space.dashboard.html import STATIC, render_template, scripts, styles
from inference_space.dashboard.page import badge_of, body, render
from inference_space.dashboard.state import Progress, RunState, moments

WEB = Path(__file__).parents[2] / "web"
_CARD = "card.png"  # the picture of links to the page
_PAGES = 8  # pages of the view Bucket that are exported
MAX_COPY = 100_000_000  # bytes; a larger run is not copied for the replica in a browser


def export(bucket: Bucket, run: str | None, folder: Path) -> Path:
    """Write `run`, or the run created last, to `folder`, and return the path of the page.

    The subfolder `watch` gets the replica for browsers. Browsers can read a bucket that is public on the Hub.
    For any other bucket, `watch` also gets a copy of the run's weights. `watch` is left out if the copy would
    exceed `MAX_COPY`, or if the folder `web/` is missing (it is only in a checkout).

    Raises `ProtocolError` if the bucket holds no run or the run has no version, and `ObjectMissingError` if
    the bucket lacks the run that `run` names.
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
    folder.mkdir(parents=True, exist_ok=True)
    watch = WEB.is_dir() and _write_replica(bucket, info.run, folder / "watch")
    card = WEB.joinpath(_CARD).is_file()
    if card:
        shutil.copyfile(WEB / _CARD, folder / _CARD)
    (folder / "badge.svg").write_text(badge_of(view))
    options = {"styles": Markup(styles()), "page": render(view), "watch": watch, "card": card}
    options["about"] = _about(newest, info.model)
    (folder / "data.js").write_text(f"window.DWS = {json.dumps(_data(library, frames, info))};\n")
    (folder / "dashboard.js").write_text((STATIC / "exported.js").read_text() + scripts())
    (folder / "README.md").write_text((STATIC / "space.md").read_text().format(title=title, run=info.run))
    (folder / "index.html").write_text(render_template("export.html", title=title, **options))
    return folder / "index.html"


def _about(newest: Progress, model: str | None) -> str:
    """One sentence for sites that show links to the page."""
    each = f", {size_text(round(newest.sync_bytes))} each" if newest.sync_bytes else ""
    of = f" of {model}" if model else ""
    whole = size_text(newest.full_bytes)
    return f"{newest.version + 1} versions{of} in RL training{each}; the whole model has {whole}"


def _write_replica(bucket: Bucket, run: str, folder: Path) -> bool:
    """Write the page of `web/`. If browsers cannot read the bucket, copy the run next to the page.
    Returns False if the run is too large to be copied; `folder` is then absent."""
    shutil.rmtree(folder, ignore_errors=True)
    keys = Keys(run)
    place = bucket.url
    copied = []
    if not _is_public(bucket.url):
        # the browser does not need the log and the states
        place = "run"
        needed = (keys.heads, keys.info)
        listed = bucket.list(keys.folder)
        copied = [one for one in listed if version_key(one.key) or one.key.startswith(needed)]
        if (size := sum(one.size for one in copied)) > MAX_COPY:
            reason = f"the run has {size_text(size)}, and at most {size_text(MAX_COPY)} are copied"
            print(f"the replica in a browser is left out: {reason}; a public bucket on the Hub needs no copy")
            return False
        advice = "if they must not become public, delete this folder before you publish the page"
        print(f"{folder} holds a copy of the run's weights, {size_text(size)}: {advice}")
    unneeded = shutil.ignore_patterns("run", "test", "node_modules", "package*.json", "tsconfig.json")
    shutil.copytree(WEB, folder, ignore=unneeded)
    for one in copied:
        with suppress(ObjectMissingError):  # a live run may delete the object meanwhile
            bucket.fetch(one.key, folder / "run" / one.key, MAX_COPY)
    if copied:  # the browser reads this list, because many file servers do not list folders
        (folder / "run" / "keys.json").write_text(json.dumps([one.key for one in copied]))
    index = folder / "index.html"
    names = 'data-bucket="{}" data-run="{}" data-keys="{}" data-first="{}"'
    # `data-first` names a file of rounded weights, to play with until the exact weights have arrived. Only
    # the recorded run in `web/` has such a file.
    given = Markup(names).format(place, run, os.environ.get(PUBLIC_KEY, ""), "")
    index.write_text(re.sub(names.replace("{}", '[^"]*'), lambda _: given, index.read_text(), count=1))
    return True


def _is_public(url: str) -> bool:
    """Whether a browser can read the bucket without a token."""
    if not url.startswith("hf://"):
        return False
    try:
        owner, name = url.split("/")[3:5]
        HfApi(endpoint=os.environ.get("HF_ENDPOINT")).bucket_info(f"{owner}/{name}", token=False)
    except HfHubHTTPError:
        return False
    return True


def _frames(library: Library) -> dict[int, Progress]:
    state = RunState()
    log = RunLogReader(library.bucket, library.run)
    state.add(log.poll())
    if log.skipped:
        print(f"{log.skipped} lines of the run's log are left out: they are not valid events")
    state.digests |= library.digests(state.served())
    if (newest := state.progress()) is None:
        raise ProtocolError(f"run {library.run!r} in {library.bucket.url} has not published a first version")
    *earlier, last = moments(newest.version)
    return {version: state.at(version, library.digests) for version in earlier} | {last: newest}


def _data(library: Library, frames: dict[int, Progress], info: RunInfo) -> dict[str, object]:
    deltas = {version: delta for version in frames if version and (delta := _delta(library, version))}
    objects = library.objects()
    pages = min(_PAGES, views.page_count(views.by_kind(objects, info.run)))
    listings = (views.listing(objects, info.run, page, deltas) for page in range(pages))
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
    """Open a version's delta. Returns None if the delta is absent, damaged or incomplete."""
    try:
        return library.delta(version)
    except (ObjectMissingError, ProtocolError, CodecError) as error:
        print(f"the delta of v{version} is left out: {error}")
        return None


def _packed(pages: Iterable[tuple[int, str]]) -> dict[int, str]:
    return {at: base64.b64encode(gzip.compress(page.encode(), mtime=0)).decode() for at, page in pages}
