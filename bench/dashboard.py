"""The dashboard of a run of 10,000 versions: what a refresh costs the server, when a visitor sees something.

Runs where there is a Chromium; elsewhere the section says that it is unmeasured.
"""

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from bench.results import SCRATCH, Results
from delta_weight_sync.records import Writer
from delta_weight_sync.runlog import RunLogReader, RunLogWriter, StepEvent
from delta_weight_sync.store import Bucket, open_bucket
from inference_space.dashboard.page import body
from inference_space.dashboard.state import RunState
from tests.support.browser import chromium, installed
from tests.support.written_run import WrittenRun, long

_VERSIONS = 10_000
_REPLICAS = ("replica-0", "replica-1", "replica-2")
_REFRESHES = 20
_VISITS = 10
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


def run(results: Results) -> dict[str, Any]:
    """Seconds and milliseconds, on the wall's clock, or why there are none."""
    try:
        installed()
    except LookupError as reason:
        return {"unmeasured": str(reason)}
    shutil.rmtree(SCRATCH / "dashboard", ignore_errors=True)
    bucket = open_bucket(f"file://{SCRATCH}/dashboard", create=True)
    written = long(bucket, _VERSIONS, _REPLICAS)
    reading_s, refreshes_ms = _server(bucket, written)
    with _served(bucket) as url:
        answers_ms = [_answer_ms(url) for _ in range(_REFRESHES)]
        paints_ms = _visits(url)
    return {
        "versions": _VERSIONS,
        "first_reading_s": reading_s,
        "refresh_ms": _spread(refreshes_ms),
        "answer_ms": _spread(answers_ms),
        "first_paint_ms": _spread(paints_ms),
    }


def _server(bucket: Bucket, written: WrittenRun) -> tuple[float, list[float]]:
    """The log's first reading, then each refresh after a new version that three replicas have taken."""
    log = RunLogReader(bucket, written.keys.run)
    state = RunState()
    first = _refresh_ms(log, state) / 1e3
    writer = RunLogWriter(bucket, written.keys.run, Writer(2, "1" * 32), every_s=3600)
    measured = []
    for version in range(_VERSIONS + 1, _VERSIONS + 1 + _REFRESHES):
        written.t += 20.0
        writer.append(StepEvent(t=written.t, step=version, reward=1.0, metrics={}))
        writer.append(written.skip_to(version))
        for replica in _REPLICAS:
            writer.append(written.commit_event(replica, version))
        writer.flush()
        measured.append(_refresh_ms(log, state))
    writer.close()
    return first, measured


def _refresh_ms(log: RunLogReader, state: RunState) -> float:
    """From the bucket to the page, as the dashboard's reader does it."""
    started = time.perf_counter()
    state.add(log.poll())
    progress = state.progress()
    assert progress is not None
    body(progress)
    return 1e3 * (time.perf_counter() - started)


@contextmanager
def _served(bucket: Bucket) -> Iterator[str]:
    """The dashboard's own address, once it has read the run."""
    command = [sys.executable, "-m", "inference_space.dashboard", "--bucket", bucket.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            while f'data-version="{_VERSIONS + _REFRESHES}"' not in httpx.get(url, timeout=60).text:
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def _answer_ms(url: str) -> float:
    started = time.perf_counter()
    httpx.get(url, timeout=60).raise_for_status()
    return 1e3 * (time.perf_counter() - started)


def _visits(url: str) -> list[float]:
    """Each by a browser that has nothing of the page yet: from the request to the headline on screen."""
    measured = []
    with chromium() as browser:
        for _ in range(_VISITS):
            with browser.new_context() as context:
                page = context.new_page()
                page.goto(url, wait_until="commit")
                page.wait_for_selector("#dws h1")
                measured.append(float(page.wait_for_function(_PAINT).json_value()))
    return measured


def _spread(measured: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(measured), 1), "worst": round(max(measured), 1)}
