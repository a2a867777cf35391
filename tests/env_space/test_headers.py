"""Every answer says which sites may frame it, and that browsers must not guess its type."""

import httpx
import pytest

from env_space.app import SETUP, create_app, server_options
from env_space.settings import Settings
from tests.env_space.service import PATIENCE_S
from tests.support.serving import serving

pytestmark = [pytest.mark.finding(20), pytest.mark.full]

KEY = "four-random-words-in-a-row"
WANTED = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
FRAMES = "frame-ancestors https://huggingface.co"


def test_every_answer_has_the_safe_headers():
    with serving(create_app(Settings(key=KEY)), **server_options(KEY)) as url:
        for method, path in [("GET", "/"), ("GET", "/page/play.js"), ("GET", "/words"), ("GET", "/docs")]:
            assert_safe(httpx.request(method, url + path, timeout=PATIENCE_S), 200)
        assert_safe(httpx.post(f"{url}/sessions", timeout=PATIENCE_S), 401)
        assert_safe(httpx.get(f"{url}/page/nothing", timeout=PATIENCE_S), 404)
        assert "default-src 'self'" in httpx.get(url, timeout=PATIENCE_S).headers["content-security-policy"]


def test_a_space_that_is_not_set_up_sends_them_too():
    with serving(SETUP.app({"WORDLE_KEY": "not set"}), **server_options()) as url:
        assert_safe(httpx.get(url, timeout=PATIENCE_S), 200)


def assert_safe(answer, status):
    assert answer.status_code == status
    assert WANTED.items() <= dict(answer.headers).items()
    assert FRAMES in answer.headers.get_list("content-security-policy")
