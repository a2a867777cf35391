"""`Run.wait`: what counts as serving a version, and what is said of a replica that does not."""

import time

import pytest

from delta_weight_sync import ConfigError, Run, replicas
from delta_weight_sync.runlog import ReplicaEvent, ReplicaReport
from tests.cli.command import command
from tests.support import tls_hosts
from tests.support.http_server import BODY, answering, dripping
from tests.support.published_run import write_run
from tests.support.tls_hosts import OWN, STRANGER


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    url = tmp_path_factory.mktemp("bucket").as_uri()
    write_run(url, tmp_path_factory.mktemp("base"), versions=3)
    return Run(f"{url}#test")


def serving(run, *versions, path="/status", digest=None):
    """A server whose replica serves these versions, one at each answer; the last one stays."""
    left = [*versions]

    def answer(request):
        if request.path.partition("?")[0] != path:
            return 404, {}, b""
        version = left.pop(0) if len(left) > 1 else left[0]
        bits = digest or (None if version is None else run.manifest(version).digest)
        status = ReplicaEvent(t=time.time(), replica="r", state="starts", version=version, digest=bits)
        return 200, {}, ReplicaReport(status=status, commits=()).model_dump_json().encode()

    return answering(answer)


@pytest.mark.full
def test_wait_returns_when_each_replica_serves_the_version_or_a_newer_one(run):
    with serving(run, None, 0, 1) as space, serving(run, 2, path="/delta_weight_sync/status") as plugin:
        assert run.wait(1, [space, plugin + "/"]) == {space: 1, plugin: 2}
        shown = command("wait", run.url, "--replicas", plugin, "--timeout", 5).output
        assert shown == f"{plugin} serves version 2\n"


def test_what_is_missing_at_each_replica_is_said(run):
    other = answering(lambda _: (200, {}, b"{}"))
    wrong = serving(run, 2, digest="0" * 16)
    with serving(run, None) as none, serving(run, 1) as old, wrong as wrong_url, other as other_url:
        urls = [none, old, wrong_url, other_url, "http://127.0.0.1:1"]
        with pytest.raises(TimeoutError) as caught:
            run.wait(2, urls, timeout_s=0)
        asked = command("wait", run.url, "--replicas", *urls, "--timeout", 0)
    message = str(caught.value)
    assert asked.code == 1
    assert "5 of 5 replicas do not serve version 2" in asked.complaint
    for part in (
        f"{none} serves no version (starts)",
        f"{old} serves version 1;",
        f"{wrong_url} serves version 2 with another digest",
        f"{other_url} gives a status of an unknown form",
        "http://127.0.0.1:1 does not answer",
    ):
        assert part in message


def test_a_status_that_drips_is_given_up(run, monkeypatch):
    monkeypatch.setattr(replicas, "_REQUEST_S", 0.1)
    with dripping(BODY) as url, pytest.raises(TimeoutError, match="takes too long"):
        run.wait(1, [url], timeout_s=0)


def test_what_is_no_url_is_refused(run):
    with pytest.raises(ConfigError, match="begin it with http"):
        run.wait(1, ["localhost:8000"])
    with pytest.raises(ConfigError, match="no replica"):
        run.wait(1, [])


def test_a_private_space_gets_the_token_that_can_only_read_and_no_other_host_does(run, tmp_path, monkeypatch):
    for name in ("SPACE_KEY", "SPACE_HF_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, name.lower())
    monkeypatch.setenv("SPACES", f"https://{OWN}")
    urls = [f"https://{OWN}", f"https://{STRANGER}"]
    with tls_hosts.answering(tmp_path, monkeypatch) as hosts:
        hosts.moved.add(OWN)  # it sends everybody to the stranger's
        with pytest.raises(TimeoutError, match="answers 307"):
            run.wait(1, urls, timeout_s=0)
    (own,) = hosts.asked[OWN]
    (stranger,) = hosts.asked[STRANGER]
    assert own["authorization"] == "Bearer space_hf_token"
    assert "authorization" not in stranger
    assert not [value for headers in (own, stranger) for value in headers.values() if "space_key" in value]
    monkeypatch.setenv("SPACE_HF_TOKEN", "hf_token")
    with pytest.raises(ConfigError, match="SPACE_HF_TOKEN is HF_TOKEN, which may write"):
        run.wait(1, urls)


def test_a_version_may_be_named_by_the_digits_of_its_number(run):
    assert run.manifest("1") == run.manifest(1)
    with serving(run, 2) as url:
        assert run.wait("2", [url]) == {url: 2}
