"""One dashboard for all tests of the page; each test begins with an empty bucket.

The dashboard may be seconds behind the bucket, and still at the run of the test before: `shown` waits for it.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from delta_weight_sync.store import Bucket, open_bucket
from tests.support.browser import PATIENCE_S
from tests.support.dashboard import dashboard
from tests.support.real_run import RealRun, Shown
from tests.support.waiting import soon
from tests.support.written_run import WrittenRun


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard") / "bucket"


@pytest.fixture(scope="package")
def url(folder: Path) -> Iterator[str]:
    """A dashboard that looks at the bucket five times a second, so that no test waits for long."""
    with pytest.MonkeyPatch.context() as often:
        for interval in ("data.EVERY_S", "data.LIST_EVERY_S"):
            often.setattr(f"inference_space.dashboard.{interval}", 0.2)
        with dashboard(open_bucket(f"file://{folder}", create=True)) as url:
            yield url


@pytest.fixture
def bucket(folder: Path) -> Bucket:
    shutil.rmtree(folder, ignore_errors=True)
    return open_bucket(f"file://{folder}", create=True)


@pytest.fixture
def run(bucket: Bucket) -> Iterator[WrittenRun]:
    run = WrittenRun(bucket, run=f"written-{uuid4().hex[:6]}")
    yield run
    run.log.close()


@pytest.fixture
def real(bucket: Bucket) -> Iterator[RealRun]:
    """A run by the real publisher, at version 3."""
    real = RealRun(bucket, run=f"real-{uuid4().hex[:6]}")
    for reward in (0.2, 0.4, 0.6):
        real.step(reward)
    yield real
    real.close()


@pytest.fixture
def shown(url: str) -> Shown:
    """Waits until the dashboard shows a run at its version (None: that there is none)."""

    def wait(real: RealRun | None) -> None:
        name = f"{real.reader.keys.run} measured" if real else ""
        wanted = f'data-run="{name}"' + (f' data-version="{real.version}"' if real else "")
        soon(lambda: wanted in httpx.get(url, timeout=PATIENCE_S).text, lambda: f"the page has no {wanted}")

    return wait
