"""A bucket of the Hub or S3 when something is wrong: the right error, soon, with the fix and no token."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from uuid import uuid4

import pytest
from obstore.exceptions import GenericError

from delta_weight_sync.errors import AccessDeniedError, BucketError, BucketUnreachableError, FencedError
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import AnchorRef
from delta_weight_sync.store import DIRECT, Bucket, open_bucket
from delta_weight_sync.store import hub as hub_bucket
from tests.support.buckets import KEY, OPERATIONS, every_operation
from tests.support.http_server import answering


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that huggingface_hub takes between its attempts, in seconds; here it does not sleep them."""
    taken: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=taken.append))
    return taken


@pytest.fixture
def bucket(hub_env: None) -> Bucket:
    """A bucket with one object."""
    bucket = open_bucket(f"hf://buckets/team/{uuid4().hex}", create=True)
    bucket.put(KEY, b"old")
    return bucket


@pytest.fixture
def refusing() -> Iterator[str]:
    """An address at which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and no other process gets it meanwhile
        yield "http://127.0.0.1:{1}".format(*held.getsockname())


@pytest.fixture
def gone(hub_env: None, refusing: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket whose Hub refuses connections."""
    url = open_bucket(f"hf://buckets/team/{uuid4().hex}", create=True).url
    monkeypatch.setenv("HF_ENDPOINT", refusing)
    return open_bucket(url)


@pytest.mark.parametrize(
    ("token", "name"),
    [
        *(("hf_wrong_secret", name) for name in OPERATIONS),
        ("hf_read", "put"),
        ("hf_read", "delete"),
        ("", "get"),
    ],
)
def test_a_token_without_the_right_is_named_but_not_shown(bucket, monkeypatch, token, name):
    right = "write" if name in ("put", "delete") else "read"
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", token)
        sentence = f"refused {right} access .* set HF_TOKEN to a token with {right} access to team/"
        with pytest.raises(AccessDeniedError, match=sentence) as caught:
            OPERATIONS[name](bucket)
    assert bucket.url in str(caught.value)
    assert not token or token not in str(caught.value)
    assert bucket.get(KEY) == b"old"


@pytest.mark.parametrize(
    "request_line",
    ["HEAD .*/resolve/", "POST .*/batch", "POST .*/paths-info", "GET .*/xet-", "POST /cas/", "GET /cas"],
)
@pytest.mark.parametrize("fault", [{"status": 503}, {"drop": True}], ids=["503", "hang up"])
def test_a_short_outage_is_not_noticed(bucket, hub, request_line, fault):
    hub.fault(request_line, times=2, **fault)
    data = uuid4().bytes * 1000  # never uploaded before, so that the client has to send it
    bucket.put(KEY, data)
    assert bucket.get(KEY) == data


@every_operation
@pytest.mark.parametrize("broken", [False, True], ids=["gone", "broken"])
def test_a_hub_that_does_not_serve_is_told_within_a_minute(bucket, gone, hub, operate, pauses, broken):
    """Each attempt is refused immediately: the pauses are all there is to wait for."""
    hub.fault("/api/|/resolve/", status=500)
    told = "answered 500 for hf://.* try again" if broken else "no answer for hf://.* network and HF_ENDPOINT"
    with pytest.raises(BucketUnreachableError, match=told):
        operate(bucket if broken else gone)
    assert sum(pauses) < 60


def test_a_hub_that_never_answers_does_not_hold_a_call_for_ever(bucket, hub, monkeypatch):
    monkeypatch.setattr(hub_bucket, "REQUEST_TIMEOUT", 0.1)
    hub.fault("HEAD .*/resolve/", delay=3600)
    with pytest.raises(BucketUnreachableError, match="ReadTimeout"):
        bucket.stat(KEY)


def test_offline_mode_is_no_answer(bucket, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BucketUnreachableError, match="OfflineModeIsEnabled"):
        bucket.get(KEY)


@pytest.mark.parametrize(
    "headers", [{"Retry-After": "3600"}, {"RateLimit": '"resolvers";r=0;t=280'}, {"Retry-After": "soon"}]
)
def test_a_busy_hub_cannot_put_a_reader_to_sleep_for_an_hour(bucket, hub, pauses, headers):
    hub.fault("HEAD .*/resolve/", status=429, headers=headers)
    with pytest.raises(BucketUnreachableError, match="answered 429"):
        bucket.stat(KEY)
    assert 5 <= sum(pauses) < 60


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"status": 503}, marks=pytest.mark.long),
        {"status": 404},
        # The client of Xet tries these again for half a minute.
        pytest.param({"truncate": 2}, marks=pytest.mark.long),
        pytest.param({"drop": True}, marks=pytest.mark.long),
        pytest.param({"flip": 1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_failed_download_leaves_the_old_file_and_no_other(bucket, hub, tmp_path, fault):
    dest = tmp_path / "model"
    dest.write_bytes(b"old weights")
    hub.fault("GET /cas/data/|GET /cas-bridge/", **fault)
    for limit in (9, DIRECT + 1):  # by its URL, and through Xet
        if "flip" in fault and limit == 9:
            continue  # there is no checksum on the way: the reader's sha256 finds it
        sentence = "could not be transferred although the Hub answers|the Hub still answered 503"
        with pytest.raises(BucketUnreachableError, match=sentence):
            bucket.fetch(KEY, dest, limit)
        assert dest.read_bytes() == b"old weights"
        assert list(tmp_path.iterdir()) == [dest]


UPLOAD = ["xorb-grants", "PUT .*/granted|/v1/xorbs/", "xorb-commits", "POST .*/shards", "POST .*/batch"]


@pytest.mark.parametrize(
    ("request_line", "keys", "read", "resumed"),
    [
        *((line, 0, 0, 0) for line in UPLOAD),
        ("GET .*/tree", 3, 1, 1),
        *(("", keys, 0, resumed) for keys, resumed in ((1, 0), (2, 1))),  # of a batch that succeeds in part
    ],
)
def test_a_version_whose_trainer_ends_at_any_request_is_whole_or_absent(
    bucket, hub, tmp_path, request_line, keys, read, resumed
):
    (tmp_path / "assets").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    batch = bucket._api.batch_bucket_files
    known = {"total": 9, "full_bytes": 18, "created_at": 1.0}

    def trainer() -> RunWriter:
        return RunWriter(bucket, "r", model="m", assets=tmp_path / "assets")

    def publish(writer: RunWriter) -> None:
        writer.commit([writer.put_delta(1, uuid4().bytes, 1)], None, digest="1" * 16, sync=1, **known)

    first = trainer()
    anchor = AnchorRef(version=0, files=first.put_weights(0, [tmp_path / "model.safetensors"]))
    first.commit([], anchor, digest="0" * 16, sync=0, **known)
    if request_line:
        hub.fault(request_line, status=400)
    else:
        bucket._api.batch_bucket_files = lambda name, add: (
            batch(name, add=add[:keys]) or batch("no/bucket", add=add)
        )
    with pytest.raises(BucketError):
        publish(first)
    hub.clear()
    bucket._api.batch_bucket_files = batch
    assert RunReader(bucket, "r").manifest().version == read
    second = trainer()
    assert second.newest.version == resumed
    assert all(bucket.stat(file.key).size == file.size for file in second.newest.files)
    with pytest.raises(FencedError):
        first.confirm()
    assert RunReader(bucket, "r").manifest() == second.newest


def test_small_objects_are_one_upload_whose_token_serves_the_next_one(bucket, hub):
    before = len(hub.requests())
    bucket.stat(KEY)
    assert [line.split("/")[0] for line in hub.requests()[before:]] == ["HEAD "], "a look is one request"
    before = len(hub.requests())
    bucket.put_all([("delta", uuid4().bytes), ("manifest", uuid4().bytes), (KEY, uuid4().bytes)])
    made = [line.split("/default/")[0] for line in hub.requests()[before:] if "/granted/" not in line]
    upload = ["POST /cas/v1/xorb-grants", "POST /cas/v1/xorb-commits", "POST /cas/v2/shards"]
    assert made == [*upload, f"POST /api/buckets/{bucket.url.removeprefix('hf://buckets/')}/batch"]
    hub.fault("POST .*/xorb-grants", times=1, status=401)
    with pytest.raises(BucketError):
        bucket.put(KEY, uuid4().bytes)
    before = len(hub.requests())
    bucket.put(KEY, uuid4().bytes)
    assert "xet-write-token" in hub.requests()[before], "the storage had refused the old token"


def test_a_reply_that_repeats_the_token_is_not_passed_on(bucket, hub, monkeypatch):
    hub.fault("/batch", status=400, headers={"X-Error-Message": "bad header: Bearer hf_write"})
    with pytest.raises(BucketError, match=r"bad header: Bearer \*\*\*"):
        bucket.delete([KEY])


def test_a_large_folder_is_listed_over_several_pages(bucket, hub):
    api = hub_bucket.HfApi(endpoint=hub.url)
    bucket_id = bucket.url.removeprefix("hf://buckets/")
    api.batch_bucket_files(bucket_id, add=[(b"x", f"many/{i:04d}") for i in range(1001)])
    assert [info.key for info in bucket.list("many/")] == [f"many/{i:04d}" for i in range(1001)]


@pytest.mark.parametrize(
    ("status", "kind"), [(403, AccessDeniedError), (404, AccessDeniedError), (503, BucketUnreachableError)]
)
def test_missing_keys_of_s3_are_asked_for_and_only_a_denial_is_one(
    s3_env, monkeypatch, tmp_path, status, kind
):
    """A trainer goes on after a failed attempt to get keys, and ends after a denial."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with answering(lambda _: (status, {}, b"")) as url:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
        with pytest.raises(kind, match=r"s3://weights/HEAD .* set AWS_ACCESS_KEY_ID"):
            open_bucket("s3://weights").stat("HEAD")


def test_a_time_out_at_the_address_of_the_machines_role_is_no_denial(s3_env):
    said = (
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 10.2s, after 5"
        " retries, max_retries: 5, retry_timeout: 60s  - HTTP error: error sending request"
    )
    with pytest.raises(BucketUnreachableError, match="set AWS_ACCESS_KEY_ID"):
        raise open_bucket("s3://weights")._explain(GenericError(said), "s3://weights/HEAD", write=True)


def test_the_keys_of_a_profile_open_s3(s3_env, monkeypatch, tmp_path):
    keys = tmp_path / "credentials"
    keys.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test-secret\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    bucket = open_bucket("s3://profiled/weights", create=True)
    bucket.put("HEAD", b"1")
    assert bucket.get("HEAD") == b"1"
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(AccessDeniedError, match=r"cannot read the keys in .* set AWS_PROFILE"):
        open_bucket("s3://profiled")


def test_keys_that_s3_refuses_are_named(s3_env, monkeypatch):
    with answering(lambda _: (403, {}, b"<Error><Code>InvalidAccessKeyId</Code></Error>")) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(AccessDeniedError, match=r"InvalidAccessKeyId.*: set AWS_ACCESS_KEY_ID"):
            open_bucket("s3://weights").list("")


def test_an_s3_that_is_gone_is_named(s3_env, refusing, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")  # five by default, ten seconds
    monkeypatch.setenv("AWS_ENDPOINT_URL", refusing)
    sentence = r"s3://weights/HEAD cannot be reached .* AWS_ENDPOINT_URL"
    with pytest.raises(BucketUnreachableError, match=sentence):
        open_bucket("s3://weights").stat("HEAD")
    monkeypatch.setenv("AWS_ENDPOINT_URL", refusing.removeprefix("http://"))
    with pytest.raises(BucketError, match="in AWS_ENDPOINT_URL, if set, https://<host>"):
        open_bucket("s3://weights").stat("HEAD")
