"""An S3 bucket when something is wrong."""

import socket
from pathlib import Path

import pytest

from delta_weight_sync.errors import AccessDeniedError, BucketUnreachableError
from delta_weight_sync.store import open_bucket


def test_missing_keys_are_asked_for(s3_env: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(AccessDeniedError, match=r"read access to s3://weights/HEAD .* set AWS_ACCESS_KEY_ID"):
        open_bucket("s3://weights").stat("HEAD")


def test_a_store_that_is_gone_is_named(s3_env: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")  # five by default, ten seconds
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nothing listens at the address, and no other process gets it meanwhile
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:{1}".format(*held.getsockname()))
        with pytest.raises(
            BucketUnreachableError, match=r"s3://weights/HEAD cannot be reached .* AWS_ENDPOINT_URL"
        ):
            open_bucket("s3://weights").stat("HEAD")
