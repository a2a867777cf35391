"""The public port: headers that protect browsers."""

import asyncio
import re

import httpx
import pytest
from markupsafe import Markup
from playwright.sync_api import expect

from delta_weight_sync.store import open_bucket
from inference_space.dashboard import page as page_module
from inference_space.dashboard.page import content_policy, first_paint
from inference_space.settings import SETUP
from tests.inference_space.asking import client, guarded
from tests.support.dashboard import RecordedControls, dashboard, mounted

EVIL = {"X-Forwarded-Host": "evil.example", "X-Gradio-Server": "http://evil.example", "Host": "evil.example"}
EVIL |= {"Origin": "https://evil.example"}


def answers(app, *asked: tuple[str, str], **options) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with client(app) as http:
            return [await http.request(method, path, **options) for method, path in asked]

    return asyncio.run(ask())


def port(folder):
    bucket = open_bucket(f"file://{folder}", create=True)
    return guarded(whole=mounted(bucket, controls=RecordedControls(), key="k"))


@pytest.mark.finding(20)
def test_every_answer_says_which_site_may_frame_it(tmp_path):
    asked = [("GET", path) for path in ("/", "/dashboard/bucket", "/theme.css", "/none")] + [("HEAD", "/")]
    asked += [("POST", "/v1/completions"), ("POST", "/gradio_api/run/predict")]
    for answer in answers(port(tmp_path), *asked):
        parts = answer.headers["content-security-policy"].split("; ")
        assert "frame-ancestors https://huggingface.co" in parts, answer.url
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert len(answer.headers.get_list("content-security-policy")) == 1
    (setup,) = answers(SETUP.app({"REPLICA_KEY": "not set"}), ("GET", "/"))
    assert "frame-ancestors https://huggingface.co" in setup.headers["content-security-policy"]


@pytest.mark.finding(20)
def test_no_header_puts_a_host_into_an_answer_or_lets_another_site_read_it(tmp_path):
    """Gradio would let any site read and send, with cookies, wherever the host is not this machine."""
    asked = [("GET", "/"), ("GET", "/logout"), ("GET", "/login/huggingface"), ("GET", "/theme.css")]
    for answer in answers(port(tmp_path), *asked, headers=EVIL):
        assert "evil.example" not in f"{answer.headers}{answer.text}"
        assert "access-control" not in f"{answer.headers}"


@pytest.mark.finding(20)
def test_only_the_pages_own_scripts_may_run():
    allowed = content_policy("<script>a()</script><script src='x'></script><script type=module>b()</script>")
    assert len(re.findall("'sha256-[^']*'", allowed)) == 2
    assert "'unsafe-inline'" not in allowed.split("script-src")[1].split(";")[0]


@pytest.mark.finding(20)
@pytest.mark.full
def test_the_page_works_within_its_policy_and_a_script_in_a_runs_data_does_not(
    browser, tmp_path, monkeypatch
):
    page = browser.new_page()  # of the usual pages, none may have anything blocked
    planted = Markup('<img src="x" onerror="window.owned = 1"><script>window.owned = 2</script>')
    monkeypatch.setattr(
        page_module, "first_paint", lambda *given, **more: first_paint(*given, **more) + planted
    )
    page.add_init_script(
        "window.blocked = [];"
        "addEventListener('securitypolicyviolation',"
        " (event) => blocked.push(`${event.effectiveDirective} ${event.blockedURI}`))"
    )
    with dashboard(open_bucket(f"file://{tmp_path}", create=True), RecordedControls()) as url:
        page.goto(f"{url}#owner")
        page.get_by_role("button", name="Pause following").click()
        expect(page.locator("#dws-owner-answer")).to_contain_text("Only the owner may do this")
        page.locator("[data-tab=bucket]").click()
        expect(page.locator(".view-bucket h1")).to_be_visible()
        assert page.evaluate("window.owned") is None
        blocked = sorted(page.evaluate("blocked"))
        page.goto("about:blank")
    assert blocked == ["script-src-attr inline", "script-src-elem inline"], "and nothing of the page's own"
