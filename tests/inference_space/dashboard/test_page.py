"""The dashboard as part of an app: its first paint, its routes, and its command."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import httpx
import pytest
from fastapi import FastAPI

from delta_weight_sync.codec import TensorRow
from delta_weight_sync.records import RunInfo
from delta_weight_sync.runlog import Rollout, StepEvent
from delta_weight_sync.store import ObjectInfo, open_bucket
from inference_space.dashboard import page as page_module
from inference_space.dashboard import views
from inference_space.dashboard.__main__ import main
from inference_space.dashboard.data import RunView
from inference_space.dashboard.export import export
from inference_space.dashboard.page import Owner, badge_of, first_paint, guarded, insert, render
from inference_space.dashboard.state import Progress
from inference_space.dashboard.views import PAGE, OpenedDelta, inside
from inference_space.settings import SETUP
from tests.inference_space.dashboard.test_data import real_run
from tests.inference_space.dashboard.test_state import progress
from tests.support.browser import PATIENCE_S
from tests.support.dashboard import KEY, RecordedControls, mounted
from tests.support.records import commit, manifest_of, status, sync
from tests.support.waiting import soon
from tests.support.written_run import FULL, TOTAL, WrittenRun


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    app = FastAPI()
    app.get("/health")(lambda: "well")
    app.post("/v1/chat/completions")(lambda: "done")
    return mounted(open_bucket(f"file://{tmp_path}", create=True), app)


def ask(app: FastAPI, *paths: str, method: str = "GET", hosts=("replica",), headers=None, **content) -> list:
    """Answers to requests at the same time, in one event loop as in a server."""

    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as client:
            asked = [(path, host) for host in hosts for path in paths]
            return await asyncio.gather(
                *(
                    client.request(method, path, headers={"Host": host, **(headers or {})}, **content)
                    for path, host in asked
                )
            )

    return asyncio.run(send())


def test_routes_of_the_app_are_not_swallowed(app: FastAPI) -> None:
    page, health = ask(app, "/", "/health")
    assert health.json() == "well"
    assert "Delta Weight Sync" in page.text
    assert ask(app, "/v1/chat/completions", method="POST")[0].json() == "done"


def test_visitors_can_only_look(app: FastAPI) -> None:
    assert ask(app, "/gradio_api/info")[0].json() == {"named_endpoints": {}, "unnamed_endpoints": {}}
    assert ask(app, "/pause", method="POST")[0].status_code in (404, 405)
    upload = {"files": b"more than one byte"}
    assert ask(app, "/gradio_api/upload", method="POST", files=upload)[0].status_code == 413


def test_it_is_compressed_for_clients_that_accept_it(app: FastAPI) -> None:
    (packed,) = ask(app, "/", headers={"accept-encoding": "gzip"})
    (plain,) = ask(app, "/", headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert 2 * int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    for answer in (packed, plain):
        assert '<main id="dws" class="first">' in answer.text
        assert "accept-encoding" in answer.headers["vary"].lower()


def test_another_gradio_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"use gradio==6\.31\.0"):
        insert("<html><body><gradio-next></gradio-next></body></html>", "")


@pytest.mark.finding(7)
def test_a_page_is_rendered_once_for_all_viewers(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    paint = mock.Mock(wraps=first_paint)
    monkeypatch.setattr(page_module, "first_paint", paint)
    pages = ask(app, *["/"] * 40, hosts=("replica", "evil.example"))
    views = [call.args[0] for call in paint.call_args_list]
    assert len({page.content for page in pages}) <= len(views)
    assert len(views) == len({view.revision for view in views}), "a page for a view, not for a visitor"
    assert len(views) < 10
    assert "evil.example" not in pages[-1].text
    assert re.search(r'"root":\s*location\.origin', pages[0].text), "a page finds its server by itself"
    assert ".invalid" not in pages[0].text


@pytest.mark.full
def test_the_command_says_where_it_serves_the_bucket_and_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    command = [sys.executable, "-m", "inference_space.dashboard", "--bucket", bucket.url]
    environ = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as server:
        assert server.stdout
        try:
            page = httpx.get(server.stdout.readline().strip(), timeout=PATIENCE_S)
        finally:
            server.terminate()
    assert "Waiting for a trainer to publish the first version" in page.text
    assert server.returncode == 128 + signal.SIGTERM
    assert list(temporary.glob("delta-weight-sync*")) == []


@pytest.mark.full
def test_a_bucket_that_does_not_exist_is_named_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inference_space.dashboard", "--bucket", f"file://{tmp_path}/typo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr
            said = server.stderr.readline()
        finally:
            server.terminate()
    assert said == (
        f"dashboard: file://{tmp_path}/typo does not exist: create the folder, or mount it."
        " The page waits for it.\n"
    )


def badge(app: FastAPI) -> str:
    (answer,) = ask(app, "/badge.svg")
    assert answer.headers["content-type"].startswith("image/svg+xml")
    ElementTree.fromstring(answer.text)
    return answer.text


@pytest.mark.full
def test_the_badge_says_which_version_a_replica_proved(tmp_path: Path) -> None:
    bucket = open_bucket(f"file://{tmp_path}", create=True)
    app = mounted(bucket)
    soon(lambda: "no version yet" in badge(app))
    run = WrittenRun(bucket)
    run.publish(FULL, TOTAL)
    run.log.flush()
    soon(lambda: "v0 · not verified" in badge(app))
    run.publish(40_000, 2_000)
    run.commit("r", 1)
    run.status("r", 1)
    run.publish(40_000, 2_000)
    run.log.flush()
    soon(lambda: "wordle: v1 · verified" in badge(app))
    run.commit("r", 2)
    run.log.append(status("r", 2).model_copy(update={"digest": "0" * 16, "t": run.t}))
    run.log.close()
    soon(lambda: "v2 · digest differs" in badge(app))


def test_a_badge_that_cannot_be_drawn_is_still_a_picture(app: FastAPI, monkeypatch) -> None:
    def fail(view: RunView) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(page_module, "badge_of", fail)
    assert "not readable" in badge(app)
    assert ask(app, "/health")[0].json() == "well"


@pytest.mark.parametrize(
    ("url", "said"), [("ftp://somewhere", "hf://buckets/<owner>/<name>"), ("", "holds no run yet")]
)
def test_an_impossible_export_ends_with_one_sentence(tmp_path, monkeypatch, url: str, said: str) -> None:
    url = url or open_bucket(f"file://{tmp_path}/bucket", create=True).url
    monkeypatch.setattr("sys.argv", ["dashboard", "--bucket", url, "--export", f"{tmp_path}/site"])
    with pytest.raises(SystemExit, match=said):
        main()
    assert not (tmp_path / "site").exists()


def test_the_url_of_the_bucket_may_name_the_run(tmp_path: Path, monkeypatch) -> None:
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    real_run(bucket)
    newer = RunInfo(run="newer", model="m", created_at=2e9, full_bytes=1)
    bucket.put("runs/newer/run.json", newer.to_bytes())
    words = ["dashboard", "--bucket", f"{bucket.url}#r", "--export", f"{tmp_path}/site"]
    monkeypatch.setattr("sys.argv", words)
    main()
    assert "<title>Delta Weight Sync: r</title>" in (tmp_path / "site" / "index.html").read_text()
    monkeypatch.setattr("sys.argv", [*words, "--run", "newer"])
    with pytest.raises(SystemExit, match="--bucket names run 'r', and --run names 'newer': name one"):
        main()


def test_an_export_has_as_many_pages_of_the_listing_as_the_page_names(tmp_path: Path) -> None:
    """More objects than fit on a page, but of no kind more than that."""
    bucket = open_bucket(f"file://{tmp_path}/bucket", create=True)
    real_run(bucket)
    for number in range(PAGE):
        bucket.put(f"runs/r/{'jumps' if number % 2 else 'log'}/other-{number}", b"")
    index = export(bucket, "r", tmp_path / "site")
    data = json.loads(index.with_name("data.js").read_text().removeprefix("window.DWS = ").rstrip(";\n"))
    assert list(data["bucket"]) == ["0"]


ATTACK = """</p></style><script>alert(1)</script><img src=x onerror=a()>" onload="a()' onload='a()"""


class Parsed(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags = set[str]()
        self.attributes = dict[str, str | None]()
        self.text = ""
        self.feed(str(page))  # plain: what is cut out of Markup is Markup again
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def run() -> Progress:
    answers = (Rollout(turns=((ATTACK, ATTACK), ("crane", f"c1-r2?{ATTACK}")), reward=0.5, sync=1),)
    group = StepEvent(t=0, step=1, reward=0.5, metrics={}, prompt=ATTACK, rollouts=answers)
    joined = [commit(ATTACK, 1), status(f"2 {ATTACK}", 1, state=ATTACK, error=ATTACK)]
    return progress(sync(1, 30), *joined, group)


def test_the_page_says_whose_signature_a_replica_checked() -> None:
    said = status("x", 1).model_copy(update={"signed_by": "d95e4c70b679c0ad"})
    for event, words in ((said, " signed by d95e4c70b679c0ad"), (status("x", 1), "")):
        page = render(view(progress(sync(1, 9), commit("x", 1), event)))
        text = " ".join(Parsed(str(page)).text.split())
        assert words in text
        assert ("signed by" in text) == bool(words)


def delta() -> OpenedDelta:
    names = (ATTACK, f"model.layers.0.{ATTACK}", f"model.layers.1.mlp.{ATTACK}")
    rows = [TensorRow(name, (2, 3), 6, 1, 0) for name in names]
    return OpenedDelta(0, 1, (ATTACK,), rows, None, ATTACK)


def view(run: Progress | None, *, read: bool = True, problem: str | None = None) -> RunView:
    return RunView(ATTACK, ATTACK, model=ATTACK, read=read, problem=problem, progress=run)


def listing() -> str:
    keys = (f"runs/r/{ATTACK}/{ATTACK}", f"runs/r/deltas/00000001.{ATTACK}")
    return views.listing([ObjectInfo(key, 1, "") for key in keys], ATTACK, 0)


def refused() -> str:
    def fail(version: int | None) -> None:
        raise ValueError(ATTACK)

    return guarded(RecordedControls(), Owner(KEY), fail)(KEY, None, None)[1]


VIEWS: dict[str, Callable[[], str]] = {
    "run": lambda: render(view(run(), problem=ATTACK)),
    "prerendered": lambda: first_paint(view(run()), owner=True),
    "reading": lambda: render(view(None, read=False)),
    "waiting": lambda: render(view(None)),
    "not readable": lambda: render(view(None, problem=ATTACK)),
    "bucket": listing,
    "delta": lambda: views.opened(manifest_of(1, 0), delta(), served=True),
    "inside a delta": lambda: inside(delta()),
    "owner": refused,
    "set-up": lambda: SETUP.page({ATTACK: ATTACK}).rpartition("<script>")[0],  # without its own script
    "badge": lambda: badge_of(view(None)) + badge_of(view(run())),
}


@pytest.mark.parametrize("name", VIEWS)
def test_hostile_text_stays_text(name: str) -> None:
    page = Parsed(VIEWS[name]())
    assert ATTACK in page.text
    assert not page.tags & {"script", "img"}
    assert not page.attributes.keys() & {"onerror", "onload"}
