"""A replica that is not set up says what it lacks: variables as it starts, a token as it reads the bucket."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from threading import Event
from uuid import uuid4

import httpx
import pytest
from playwright.sync_api import expect
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

import inference_space
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import Keys
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY
from delta_weight_sync.store import open_bucket
from delta_weight_sync.store.notifications import Notifications
from inference_space.app import main
from inference_space.public_port import SpaceFollower
from inference_space.settings import SETUP, Settings, look_at_bucket
from inference_space.vllm_server import VllmServer
from space_guard.setup import Found, Problems, SettingsError
from tests.env_space.service import ROOT, Space
from tests.support.buckets import CountedBucket
from tests.support.serving import serving
from tests.support.waiting import PATIENCE_S, soon

SET_UP = {
    "SPACE_ID": "me/wordle-replica-1",
    "REPLICA_BUCKET": "hf://buckets/me/wordle",
    "REPLICA_RUN": "first",
    "REPLICA_KEY": "four-random-words-in-a-row",
}
LOOPBACK = {"REPLICA_HOST": "127.0.0.1"}
WRONG = "replica: correct these variables: "


def find_problems(environ: dict[str, str]) -> Problems:
    with pytest.raises(SettingsError) as refused:
        Settings.read(environ)
    return refused.value.problems


@pytest.mark.parametrize("name", ["REPLICA_BUCKET", "REPLICA_RUN", "REPLICA_KEY"])
def test_each_variable_that_is_missing_is_named_with_its_purpose(name):
    environ = {variable: value for variable, value in SET_UP.items() if variable != name}
    problems = find_problems(environ)
    assert dict(problems) == {name: "not set"}
    with TestClient(SETUP.app(problems)) as client:
        home = client.get("/")
        health = client.get("/health")
        refused = [client.get("/ready"), client.get("/status"), client.post("/v1/completions", json={})]
    assert (home.status_code, health.status_code) == (200, 200)
    assert "Variables and secrets" in home.text
    item = home.text.split(f"<code>{name}</code>")[1].split("</li>")[0]
    assert f"<small>{SETUP.needs[name]['kind']}</small>" in item
    assert "not set" in item
    assert home.text.count('class="missing"') == 1
    assert [answer.status_code for answer in refused] == [503] * 3
    assert all(f"{name}: not set" in answer.json()["error"] for answer in refused)


@pytest.mark.parametrize(
    ("variables", "name", "said"),
    [
        ({"REPLICA_BUCKET": "me/wordle"}, "REPLICA_BUCKET", "hf://buckets/<owner>/<name>"),
        ({"REPLICA_BUCKET": "hf_geheimnis"}, "REPLICA_BUCKET", "hf://buckets/<owner>/<name>"),
        ({"REPLICA_RUN": "../first"}, "REPLICA_RUN", "is not a run name"),
        ({"REPLICA_KEY": "1234"}, "REPLICA_KEY", "shorter than 16 characters"),
        ({"REPLICA_KEY": "geheimnis mit leerzeichen"}, "REPLICA_KEY", "printable ascii without spaces"),
        ({"REPLICA_PORT": "http"}, "REPLICA_PORT", "valid integer"),
        ({PUBLIC_KEY: "ed25519_secret_geheimnis"}, PUBLIC_KEY, "is not a key"),
        ({SIGNING_KEY: "ed25519_secret_geheimnis"}, SIGNING_KEY, "only the trainer may have it"),
        ({"REPLICA_BUKCET": "x"}, "REPLICA_BUKCET", "there is no such variable"),
    ],
)
def test_each_variable_that_cannot_be_used_is_named_and_no_value_of_a_secret_is_told(variables, name, said):
    problems = find_problems(SET_UP | variables)
    assert list(problems) == [name]
    assert said in problems[name]
    assert "geheimnis" not in SETUP.page(problems) + SETUP.sentence(problems)


PUBLIC = "ed25519_public_" + "ab" * 32


def classes_of(page: str) -> dict[str, str]:
    """The class of each item of the page, by the name of its variable or secret."""
    return {name: kind for kind, name in re.findall(r'<li class="(\w+)"><h2><code>(\w+)</code>', page)}


def test_the_page_of_a_duplicate_names_at_once_all_that_is_missing_wrong_or_foreign(monkeypatch):
    """The variables came with the duplicate, on another account and on hardware without a GPU."""
    environ = {
        "SPACE_ID": "me/copy",
        "ACCELERATOR": "none",
        "REPLICA_BUCKET": "hf://buckets/team/wordle",
        "REPLICA_NAME": "<b>first</b>",
        "REPLICA_POLL_S": "often",
        "REPLICA_VLLM_ARGS": "--api-key geheimnis",
        "REPLICA_BUKCET": "geheimnis",
        PUBLIC_KEY: PUBLIC,
        SIGNING_KEY: "ed25519_secret_geheimnis",
        "HF_TOKEN": "hf_geheimnis",
    }
    monkeypatch.setattr("delta_weight_sync.gpu_build.is_installed", lambda: True)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    page = SETUP.page(find_problems(environ))
    bad = ["REPLICA_RUN", "REPLICA_KEY", "REPLICA_POLL_S", "REPLICA_BUKCET", SIGNING_KEY, "hardware"]
    fine = ["HF_TOKEN", "REPLICA_NAME", "REPLICA_VLLM_ARGS"]
    assert classes_of(page) == (
        dict.fromkeys(bad, "missing")
        | dict.fromkeys(["REPLICA_BUCKET", PUBLIC_KEY], "check")
        | dict.fromkeys(fine, "fine")
    )
    assert "It belongs to team, not to me" in page
    assert "such as l4x1 ($0.80 per hour)" in page
    assert "cpu-basic, it costs nothing" in page
    for shown in ("hf://buckets/team/wordle", PUBLIC, "&lt;b&gt;first&lt;/b&gt;"):
        assert f"<code>{shown}</code>" in page, "the values of variables"
    for link in ("me/copy/settings", "me/copy?duplicate=true"):
        assert f'href="https://huggingface.co/spaces/{link}"' in page
    assert "geheimnis" not in page


def test_what_is_the_owners_is_not_foreign_and_a_gpu_has_its_price(monkeypatch):
    own = SET_UP | {"ACCELERATOR": "l4x1", PUBLIC_KEY: PUBLIC}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    page = SETUP.page({"REPLICA_KEY": "not set"})
    assert set(classes_of(page).values()) == {"missing", "fine"}
    assert "it costs $0.80 per hour (l4x1)" in page
    assert "a paused Space costs nothing" in page


def test_a_look_that_takes_long_does_not_keep_the_page(monkeypatch):
    monkeypatch.setattr("space_guard.setup._LOOK_S", 0.01)
    gate = Event()

    def look() -> Found:
        gate.wait(PATIENCE_S)
        return Found({"HF_TOKEN": "not readable"})

    with TestClient(SETUP.app({"REPLICA_KEY": "not set"}, look)) as client:
        assert set(classes_of(client.get("/").text).values()) == {"missing", "fine"}
        assert classes_of(client.get("/").text)["HF_TOKEN"] == "fine"
        gate.set()
        soon(lambda: classes_of(client.get("/").text)["HF_TOKEN"] == "missing")


def test_a_look_that_fails_does_not_hide_what_is_known(caplog):
    def look() -> Found:
        raise OSError("no network")

    with TestClient(SETUP.app({"REPLICA_KEY": "not set"}, look)) as client:
        assert classes_of(client.get("/").text)["REPLICA_KEY"] == "missing"
    assert "no network" in caplog.text


def test_a_set_up_space_starts():
    assert Settings.read(SET_UP).key


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_elsewhere_than_on_the_hub_a_replica_on_loopback_needs_no_key(host):
    environ = {name: value for name, value in SET_UP.items() if name not in ("SPACE_ID", "REPLICA_KEY")}
    assert Settings.read(environ | {"REPLICA_HOST": host}).key == ""
    for reachable in ({}, {"REPLICA_HOST": "0.0.0.0"}, {"REPLICA_HOST": "gpu1"}):
        problems = find_problems(environ | reachable)
        assert "only a replica with REPLICA_HOST=127.0.0.1 needs no key" in problems["REPLICA_KEY"]
    assert list(find_problems(environ | {"REPLICA_HOST": host, "SPACE_ID": "me/r"})) == ["REPLICA_KEY"]


@pytest.mark.full
def test_the_setup_page_stays_within_its_policy(page):
    with serving(SETUP.app({"REPLICA_KEY": "not set"})) as url:
        page.goto(url)  # anything blocked would fail the test
        expect(page.locator("li.missing")).to_contain_text("REPLICA_KEY")


@pytest.mark.parametrize("space", ["env_space", "inference_space"])
def test_the_user_of_an_image_cannot_write_its_code(space):
    """Files are copied and installed as root; the last steps give nothing but numba's cache away."""
    root, _, user = (ROOT / space / "Dockerfile").read_text().partition("\nUSER 1000\n")
    assert user
    assert not re.search("^(RUN|COPY|ADD|USER) ", user, re.MULTILINE)
    assert re.findall("chmod .*", root) == ["chmod -R a+rwX /app/numba"] * (space == "inference_space")
    assert "chown" not in root


@pytest.mark.full
@pytest.mark.long
def test_a_duplicated_space_serves_the_page_and_says_so_once(tmp_path):
    """As on the Hub, where a duplicate has the variables, but no secret."""
    running = Space(tmp_path / "log", app="inference_space", **SET_UP | {"REPLICA_KEY": ""})
    try:
        running.wait()
        home = httpx.get(running.url, timeout=PATIENCE_S)
    finally:
        said = running.stop()
    assert "REPLICA_KEY" in home.text
    assert "https://huggingface.co/spaces/me/wordle-replica-1/settings" in home.text
    assert said.count("This Space is not set up") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (LOOPBACK, f"{WRONG}REPLICA_BUCKET: not set; REPLICA_RUN: not set"),
        (
            LOOPBACK | {"REPLICA_BUCKET": "ftp://x", "REPLICA_RUN": "a"},
            f"{WRONG}REPLICA_BUCKET: 'ftp://x' is not",
        ),
        (
            LOOPBACK | {"REPLICA_BUCKET": "file:///tmp", "REPLICA_RUN": "a", "REPLICA_FOLDER": "/tmp"},
            f"{WRONG}REPLICA_FOLDER: /tmp may be written to by every user",
        ),
    ],
)
def test_elsewhere_than_on_the_hub_it_ends_with_a_sentence(monkeypatch, variables, said):
    monkeypatch.delenv("SPACE_ID", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value).startswith(said)


@pytest.fixture
def wordle(hub_env):
    """A Hub with the private bucket team/wordle."""
    open_bucket("hf://buckets/team/wordle", create=True)


@pytest.mark.parametrize(
    ("token", "bucket", "name", "said"),
    [
        ("", "team/wordle", "HF_TOKEN", "HF_TOKEN is not set"),
        ("hf_typo", "team/wordle", "HF_TOKEN", "the token is wrong or expired"),
        ("hf_expired", "team/wordle", "HF_TOKEN", "the token is wrong or expired"),
        ("hf_free", "team/wordle", "REPLICA_BUCKET", "set HF_TOKEN to a token that may see it"),
        ("hf_bucket_read", "team/other", "REPLICA_BUCKET", "set HF_TOKEN to a token that may see it"),
        ("hf_read", "team/wrdle", "REPLICA_BUCKET", "hf://buckets/team/wrdle does not exist"),
    ],
)
def test_why_the_bucket_cannot_be_read(wordle, monkeypatch, tmp_path, caplog, token, bucket, name, said):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("delta_weight_sync.watch.LONGEST_S", 0.05)
    follower = following(f"hf://buckets/{bucket}", tmp_path, lambda follower: follower.problems)
    status = follower.report(0).status
    assert list(follower.problems) == [name]
    assert said in follower.problems[name]
    assert status.error == f"{name}: {follower.problems[name]}"
    assert caplog.text.count(said) == 1, "said once, however often it is tried"
    if token:
        assert token not in status.error


@pytest.mark.parametrize(
    ("token", "run", "expected"),
    [
        ("", "first", Found({"HF_TOKEN": "HF_TOKEN is not set"})),
        ("hf_typo", "first", Found({"HF_TOKEN": "the token is wrong or expired"})),
        ("hf_read", "first", Found({}, {"REPLICA_RUN": "The bucket holds 2 runs."})),
        ("hf_read", "", Found({}, {"REPLICA_RUN": "The bucket holds 2 runs."})),
    ],
)
def test_the_page_looks_at_the_bucket_before_the_space_is_set_up(wordle, monkeypatch, token, run, expected):
    bucket = open_bucket("hf://buckets/team/wordle")
    for name in ("secretive", "other"):
        bucket.put(Keys(name).info, b"{}")
    monkeypatch.setenv("HF_TOKEN", token)
    found = look_at_bucket({"REPLICA_BUCKET": "hf://buckets/team/wordle", "REPLICA_RUN": run})
    assert (found.problems.keys(), found.notes.keys()) == (expected.problems.keys(), expected.notes.keys())
    for said, wanted in zip(found, expected, strict=True):
        assert all(wanted[name] in said[name] for name in wanted)
    assert "secretive" not in str(found), "strangers may see the page"


@pytest.mark.long
def test_in_one_visit_a_duplicate_becomes_the_dashboard(wordle, monkeypatch, tmp_path, page):
    """The platform starts the process again for each changed setting; nobody reloads the page."""
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    copied = {"SPACE_ID": "team/copy", "REPLICA_BUCKET": "hf://buckets/team/wordle"}
    copied |= {"REPLICA_FOLDER": str(tmp_path / "folder"), "REPLICA_RUN": "../first"}
    running = Space(tmp_path / "log", app="inference_space", **copied)
    url = running.url
    set_later = [{}, {"REPLICA_RUN": "first"}, {"REPLICA_KEY": SET_UP["REPLICA_KEY"]}]
    names = [{"REPLICA_RUN", "REPLICA_KEY"}, {"REPLICA_KEY"}]
    try:
        for number, more in enumerate(set_later):
            copied |= more
            if number:
                running.stop()
                running = Space(
                    tmp_path / "log",
                    app="inference_space",
                    **copied,
                    REPLICA_PORT=url.rpartition(":")[2],
                )
            else:
                running.wait()
                page.goto(url)
            if number < len(names):
                expect(page.locator("li.missing")).to_have_count(len(names[number]))
                assert {*page.locator("li.missing code").all_text_contents()} == names[number]
        expect(page.locator("#dws-live h1")).to_contain_text("Waiting for a trainer")
        page.goto("about:blank")
    finally:
        running.stop()


@pytest.mark.parametrize("token", ["hf_write", "hf_read", "hf_bucket_read"])
def test_a_token_that_may_read_is_enough(wordle, monkeypatch, tmp_path, token):
    monkeypatch.setenv("HF_TOKEN", token)

    def waits(follower: SpaceFollower) -> bool:
        return follower.report(0).status.state == "waiting for the run's first version"

    follower = following("hf://buckets/team/wordle", tmp_path, waits)
    assert waits(follower)
    assert (follower.problems, follower.report(0).status.error) == ({}, None)


def following(url: str, folder, until) -> SpaceFollower:
    """A follower of the bucket at `url` that got as far as `until`, and has looked a few times more."""
    settings = Settings(bucket=url, run=f"run-{uuid4().hex}", poll_s=0.05, folder=str(folder))
    bucket = Silent(open_bucket(url))
    reader = RunReader(bucket, settings.run)
    follower = SpaceFollower(reader, VllmServer(settings), name="r", folder=folder, poll_s=0.05)
    follower.start()
    soon(lambda: until(follower))
    seen = bucket.asked["list"]
    soon(lambda: bucket.asked["list"] > seen + 3)
    follower.stop()
    return follower


class Silent(CountedBucket):
    """A bucket that tells nobody of changes, and counts how often somebody looked for them."""

    def notifications(self, prefix: str) -> Notifications:
        return Notifications()


def test_the_page_gives_way_when_the_bucket_can_be_read():
    problems = {"HF_TOKEN": "not set"}
    app = Starlette(exception_handlers={404: lambda request, _: PlainTextResponse("the dashboard")})
    app.add_middleware(SETUP.show_page, problems=lambda: problems)
    with TestClient(app) as client:
        assert "<code>HF_TOKEN</code>" in client.get("/").text
        assert client.get("/theme.css").text == "the dashboard"
        problems.clear()
        assert client.get("/").text == "the dashboard"


@pytest.mark.finding("N18")
def test_vllms_engine_never_sees_a_secret():
    secrets = dict.fromkeys(("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_API_KEY", "DB_PASSWORD"), "do-not-leak")
    secrets |= dict.fromkeys(("DATABASE_URL", "VLLM_API_KEY", "a-b"), "postgres://u:do-not-leak@h")
    environment = {**os.environ, **secrets, "ENGINE_PYTHON": sys.executable, "OMP_X": "a value\nof two lines"}
    script = Path(inference_space.__file__).with_name("engine_python.sh")
    command = ["sh", script, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    seen = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert "do-not-leak" not in str(seen)
    assert (seen["OMP_X"], seen["HF_HUB_OFFLINE"]) == (environment["OMP_X"], "1")
    assert {"PATH", "HOME"} <= seen.keys()
