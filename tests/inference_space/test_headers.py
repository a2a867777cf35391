"""Only the Hub may frame the page, and no header puts another host into it."""

import asyncio
import logging
import re

import httpx
import pytest
import uvicorn
from markupsafe import Markup

from delta_weight_sync.store import open_bucket
from inference_space import public_port
from inference_space.dashboard import page as page_module
from inference_space.dashboard.page import content_policy
from inference_space.settings import SETUP
from tests.inference_space.asking import client, gate
from tests.support.dashboard import RecordedControls, controlled, mounted

pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.finding(20)

EVIL = {"X-Forwarded-Host": "evil.example", "X-Gradio-Server": "http://evil.example", "Host": "evil.example"}


def answers(app, *asked: tuple[str, str], **options) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with client(app) as http:
            return [await http.request(method, path, **options) for method, path in asked]

    return asyncio.run(ask())


def gated(folder):
    before, bucket = gate(), open_bucket(f"file://{folder}", create=True)
    before._app = mounted(bucket, controls=RecordedControls(), key="k")
    return before


def test_every_answer_says_which_site_may_frame_it(tmp_path):
    asked = [("GET", path) for path in ("/", "/dashboard/bucket", "/theme.css", "/none")] + [("HEAD", "/")]
    asked += [("POST", "/v1/completions"), ("POST", "/gradio_api/run/predict")]
    for answer in answers(gated(tmp_path), *asked):
        parts = answer.headers["content-security-policy"].split("; ")
        assert "frame-ancestors https://huggingface.co" in parts, answer.url
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert len(answer.headers.get_list("content-security-policy")) == 1
    (setup,) = answers(SETUP.app({"REPLICA_KEY": "not set"}), ("GET", "/"))
    assert "frame-ancestors https://huggingface.co" in setup.headers["content-security-policy"]


def test_no_header_puts_a_host_into_an_answer(tmp_path):
    asked = [("GET", "/"), ("GET", "/logout"), ("GET", "/login/huggingface"), ("GET", "/theme.css")]
    for answer in answers(gated(tmp_path), *asked, headers=EVIL):
        assert "evil.example" not in f"{answer.headers}{answer.text}"


def test_only_the_pages_own_scripts_may_run():
    allowed = content_policy("<script>a()</script><script src='x'></script><script type=module>b()</script>")
    assert len(re.findall("'sha256-[^']*'", allowed)) == 2
    assert "'unsafe-inline'" not in allowed.split("script-src")[1].split(";")[0]


@pytest.mark.parametrize(("in_a_space", "proxies"), [(True, True), (False, False)])
def test_only_the_hubs_proxies_set_the_clients_address(monkeypatch, in_a_space, proxies):
    """uvicorn takes the last address that is not a proxy's; a visitor can only write those before it."""
    given = {}
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "filters", [])
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: given.update(options))
    monkeypatch.setenv("SPACE_ID", "ada/replica")
    if not in_a_space:
        monkeypatch.delenv("SPACE_ID")
    public_port.listen(None, "127.0.0.1", 1)
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["client"][0])

    behind = uvicorn.middleware.proxy_headers.ProxyHeadersMiddleware(
        app, given["forwarded_allow_ips"] or "127.0.0.1"
    )
    forwarded = [(b"x-forwarded-for", b"192.0.2.66, 203.0.113.7, 10.1.2.3")]
    for peer in ("10.9.9.9", "203.0.113.99"):
        asyncio.run(behind({"type": "http", "client": (peer, 1), "headers": forwarded}, None, None))
    assert seen == ["203.0.113.7" if proxies else "10.9.9.9", "203.0.113.99"]


@pytest.mark.full
def test_the_page_works_within_its_policy_and_a_script_in_a_runs_data_does_not(
    page: Page, tmp_path, monkeypatch
) -> None:
    planted = '<img src="x" onerror="window.owned = 1"><script>window.owned = 2</script>'
    paint = page_module.first_paint
    monkeypatch.setattr(
        page_module, "first_paint", lambda *given, **more: paint(*given, **more) + Markup(planted)
    )
    page.add_init_script(
        "window.blocked = [];"
        "addEventListener('securitypolicyviolation',"
        " (event) => blocked.push(`${event.effectiveDirective} ${event.blockedURI}`))"
    )
    with controlled(open_bucket(f"file://{tmp_path}", create=True), RecordedControls()) as url:
        page.goto(f"{url}#owner")
        page.get_by_role("button", name="Pause following").click()
        expect(page.locator("#dws-owner-answer")).to_contain_text("Only the owner may do this")
        page.locator("[data-tab=bucket]").click()
        expect(page.locator(".view-bucket h1")).to_be_visible()
        assert page.evaluate("window.owned") is None
        blocked = sorted(page.evaluate("blocked"))
        page.goto("about:blank")
    assert blocked == ["script-src-attr inline", "script-src-elem inline"], "and nothing of the page's own"
