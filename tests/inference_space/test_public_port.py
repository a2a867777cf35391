"""The public port: headers that protect browsers, visitors who slow nobody, clients that are slow."""

import asyncio
import logging
import re
from dataclasses import replace

import httpx
import pytest
from markupsafe import Markup
from playwright.sync_api import expect
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from uvicorn import Config
from uvicorn.server import ServerState

from delta_weight_sync.store import open_bucket
from inference_space import public_port
from inference_space.dashboard import page as page_module
from inference_space.dashboard.page import content_policy, first_paint
from inference_space.gate import RATE
from inference_space.public_port import KEEP_ALIVE_S, LIMITS, MAX_VISITORS
from inference_space.settings import SETUP
from space_guard.limits import PROXIES, LogLimit, limited_http
from space_guard.requests import RateLimit
from tests.inference_space.asking import KEY, OTHER, VISITOR, client, gate, running, trainer
from tests.support.dashboard import RecordedControls, dashboard, mounted

EVIL = {"X-Forwarded-Host": "evil.example", "X-Gradio-Server": "http://evil.example", "Host": "evil.example"}
EVIL |= {"Origin": "https://evil.example"}


def answers(app, *asked: tuple[str, str], **options) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with client(app) as http:
            return [await http.request(method, path, **options) for method, path in asked]

    return asyncio.run(ask())


def gated(folder):
    bucket = open_bucket(f"file://{folder}", create=True)
    return gate(whole=mounted(bucket, controls=RecordedControls(), key="k"))


@pytest.mark.finding(20)
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


@pytest.mark.finding(20)
def test_no_header_puts_a_host_into_an_answer_or_lets_another_site_read_it(tmp_path):
    """Gradio would let any site read and send, with cookies, wherever the host is not this machine."""
    asked = [("GET", "/"), ("GET", "/logout"), ("GET", "/login/huggingface"), ("GET", "/theme.css")]
    for answer in answers(gated(tmp_path), *asked, headers=EVIL):
        assert "evil.example" not in f"{answer.headers}{answer.text}"
        assert "access-control" not in f"{answer.headers}"


@pytest.mark.finding(20)
def test_only_the_pages_own_scripts_may_run():
    allowed = content_policy("<script>a()</script><script src='x'></script><script type=module>b()</script>")
    assert len(re.findall("'sha256-[^']*'", allowed)) == 2
    assert "'unsafe-inline'" not in allowed.split("script-src")[1].split(";")[0]


@pytest.mark.finding(19)
@pytest.mark.finding(20)
@pytest.mark.parametrize("proxies", [PROXIES, None], ids=["in a Space", "elsewhere"])
def test_only_the_hubs_proxies_set_the_clients_address_and_the_log_is_limited(monkeypatch, proxies):
    """Which address uvicorn then takes, tests/space_guard/test_limits.py shows."""
    given, server = {}, logging.getLogger("uvicorn.error")
    monkeypatch.setattr(server, "filters", [])
    monkeypatch.setattr(public_port, "serve", lambda app, **options: given.update(options))
    monkeypatch.setenv("SPACE_ID", "ada/replica")
    if not proxies:
        monkeypatch.delenv("SPACE_ID")
    public_port.listen(None, "127.0.0.1", 1)
    assert given["forwarded_allow_ips"] == proxies
    assert [type(found) for found in server.filters] == [LogLimit]
    assert (given["access_log"], given["log_level"]) == (False, "error"), "no line for what is not HTTP"


@pytest.mark.finding(20)
@pytest.mark.full
def test_the_page_works_within_its_policy_and_a_script_in_a_runs_data_does_not(page, tmp_path, monkeypatch):
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


@pytest.mark.finding(7)
def test_a_visitors_rate_limit_leaves_others_alone():
    async def scenario():
        app = gate(rate=RateLimit(*RATE, clock=asyncio.get_running_loop().time))
        async with client(app, VISITOR) as flood, client(app, OTHER) as other, trainer(app) as keyed:
            answers = [(await flood.get("/")).status_code for _ in range(2000)]
            others = [(await who.get("/")).status_code for who in (other, keyed)]
            keyed_too = {(await keyed.get("/v1/models")).status_code for _ in range(1000)}
            await asyncio.sleep(1)
            later = [(await flood.get("/")).status_code for _ in range(200)]
        return answers, others, keyed_too, later

    answers, others, keyed, later = running(scenario)
    per_second, burst = RATE
    assert answers == sorted(answers), "and none after the first refusal"
    assert answers.count(200) == pytest.approx(burst / 2, abs=1)
    assert (others, keyed) == ([200, 200], {200})
    assert later.count(200) == pytest.approx(per_second / 2, abs=1)


@pytest.mark.finding(7)
def test_old_visitors_are_forgotten():
    rate = RateLimit(1.0, 1.0, clock=lambda: 0.0)
    for number in range(5000):
        rate.spend(f"visitor {number}", 1.0)
    assert rate.spend("visitor 0", 1.0) == 0.0
    assert rate.spend("visitor 4999", 1.0) == 1.0, "seconds until it can pay"


ASK = b"GET /health HTTP/1.1\r\nHost: replica\r\n"


class Link(asyncio.Transport):
    """The client's end of a connection."""

    def __init__(self, port: "Port") -> None:
        super().__init__({"peername": ("203.0.113.7", 1)})
        self.received, self.open = b"", True
        self._protocol = port.http(config=port.config, server_state=port.state, app_state={})
        self._protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        if self.open:
            self._protocol.data_received(data)

    def write(self, data: bytes) -> None:
        self.received += data

    def abort(self) -> None:
        if self.open:
            self.open = False
            self._protocol.connection_lost(None)

    close = abort

    def is_closing(self) -> bool:
        return not self.open

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Port:
    """uvicorn, without a socket."""

    def __init__(self, app=None, limits=LIMITS) -> None:
        self.http = limited_http(limits, MAX_VISITORS, KEY)
        self.config = Config(gate(app or well), log_level="error", timeout_keep_alive=KEEP_ALIVE_S)
        self.config.load()
        self.state = ServerState()


async def well(_: Request) -> Response:
    return PlainTextResponse("well")


@pytest.mark.finding(6)
def test_the_next_head_must_also_arrive_in_time():
    async def scenario():
        link = Link(Port())
        link.send(ASK + b"\r\n")
        await asyncio.sleep(LIMITS.request_s + 5)
        assert link.received.endswith(b"well")
        assert link.open, "it is kept for the next request"
        link.send(ASK)
        for _ in range(int(LIMITS.request_s) + 2):
            link.send(b"X-Slow: 1\r\n")
            await asyncio.sleep(1)
        return link.open

    assert running(scenario) is False


@pytest.mark.finding(6)
def test_a_slow_answer_is_not_cut_off():
    async def scenario():
        async def slow(_: Request) -> Response:
            await asyncio.sleep(10 * LIMITS.request_s)
            return PlainTextResponse("at last")

        link = Link(Port(slow))
        link.send(ASK + b"\r\n")
        await asyncio.sleep(11 * LIMITS.request_s)
        return link.open, link.received[-7:]

    assert running(scenario) == (True, b"at last")


@pytest.mark.finding(6)
def test_a_request_behind_another_one_ends_both():
    """Otherwise the first would go on although its client has left, which ends it in vLLM."""

    async def scenario():
        gone = asyncio.Event()

        async def until_gone(request: Request) -> Response:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone.set()
            return PlainTextResponse("gone")

        link = Link(Port(until_gone))
        link.send(ASK + b"\r\n")
        await asyncio.sleep(1)
        link.send(ASK + b"\r\n")
        async with asyncio.timeout(60):
            await gone.wait()
        return link.open

    assert running(scenario) is False


HALF = ASK.replace(b"GET /health", b"POST /gradio_api/run/predict")
HALF += b"Content-Type: application/json\r\nContent-Length: 1\r\n\r\n"


@pytest.mark.finding(6)
@pytest.mark.finding("N3")
@pytest.mark.parametrize(
    ("said", "busy", "keep_active"),
    [((ASK + b"\r\n",), 1, True), ((ASK + b"\r\n",), 1, False), ((HALF,), 0, True), ((HALF, b"x"), 0, True)],
    ids=["after an answer", "in the environment", "half a body", "the rest of a body after the answer"],
)
def test_the_longest_idle_visitor_is_evicted_and_no_trainer(said, busy, keep_active):
    """Of visitors that were answered, the first `busy` ask again."""

    async def scenario():
        port = Port(limits=replace(LIMITS, keep_active=keep_active))
        trainer = Link(port)
        trainer.send(ASK + f"X-Space-Key: {KEY}\r\n\r\n".encode())
        await asyncio.sleep(1)
        visitors = []
        for number in range(MAX_VISITORS + 10):
            visitors.append(Link(port))
            for link in (visitors[-1], *(visitors[:busy] if number == MAX_VISITORS - 1 else ())):
                for part in said:
                    link.send(part)
                    await asyncio.sleep(0.001)
        return trainer.open, [link.open for link in visitors]

    stays, visitors = running(scenario)
    assert stays
    assert visitors == [True] * busy + [False] * 10 + [True] * (MAX_VISITORS - busy)
