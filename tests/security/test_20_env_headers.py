"""Finding 20, at the environment: nothing said where the page may be framed, nor what a file is."""

import httpx
import pytest

from env_space import server, setup_page
from env_space.app import create_app
from env_space.settings import Settings
from tests.env.service import PATIENCE_S
from tests.policies.serving import serving

pytestmark = pytest.mark.full

KEY = "four-random-words-in-a-row"
WANTED = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
FRAMES = "frame-ancestors https://huggingface.co"


def test_every_answer_says_where_it_may_be_framed_and_what_it_is():
    with serving(create_app(Settings(key=KEY)), **server.options(KEY)) as url:
        for method, path in [("GET", "/"), ("GET", "/page/play.js"), ("GET", "/words"), ("GET", "/docs")]:
            assert_safe(httpx.request(method, url + path, timeout=PATIENCE_S), 200)
        assert_safe(httpx.post(f"{url}/sessions", timeout=PATIENCE_S), 401)
        assert_safe(httpx.get(f"{url}/page/nothing", timeout=PATIENCE_S), 404)
        assert "default-src 'self'" in httpx.get(url, timeout=PATIENCE_S).headers["content-security-policy"]


def test_so_does_a_space_that_is_not_set_up():
    with serving(setup_page.create_app({"WORDLE_KEY": "is not set."}), **server.options()) as url:
        assert_safe(httpx.get(url, timeout=PATIENCE_S), 200)


def assert_safe(answer, status):
    assert answer.status_code == status
    assert WANTED.items() <= dict(answer.headers).items()
    assert FRAMES in answer.headers.get_list("content-security-policy")
