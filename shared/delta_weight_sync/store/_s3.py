"""A bucket of any S3-compatible store, through obstore.

Keys, region and endpoint come from the usual variables: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_DEFAULT_REGION, AWS_ENDPOINT_URL. If these hold no keys, boto3 reads your profile in
`~/.aws/credentials`; without this file, the machine's role is used. The store must show each put immediately,
as AWS does: no second request checks a put. Decision 0008 explains obstore and the lack of conditional puts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import obstore
from obstore.exceptions import BaseError, InvalidPathError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from delta_weight_sync import errors, store

_PARTS: Final = 8  # requests in parallel
# Without keys, obstore asks the cloud for those of the machine's role, at these paths.
_ROLE = re.compile(r"/latest/(api/token|meta-data/)")
# What other errors say if they are refusals. The cloud answers 404 if the machine has no role.
_REFUSED = re.compile(rf"40[13]:? (Unauthorized|Forbidden)|ExpiredToken|{_ROLE.pattern}.*404 Not Found")


class S3Bucket(store.Bucket):
    """See `delta_weight_sync.store.Bucket`."""

    report_every_s = 10.0
    _failures = (OSError, ValueError, BaseError)

    def __init__(self, url: str, *, create: bool = False) -> None:
        match = re.fullmatch(r"s3://([a-z0-9.-]+)(?:/(.*?))?/?", url)
        if not match or "://" not in os.environ.get("AWS_ENDPOINT_URL", "://"):
            fix = "write s3://<name>[/<prefix>], and in AWS_ENDPOINT_URL, if set, https://<host>"
            raise errors.BucketError(f"{url!r} is not an S3 bucket: {fix}")
        super().__init__(url)
        self._root = f"{store.check_key(match[2])}/" if match[2] else ""
        self._store = S3Store(
            match[1],
            client_options={"allow_http": True, "connect_timeout": "10s", "timeout": "120s"},
            retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=60)},
            credential_provider=_profile(),
        )
        if create and not self._is_there():
            with self._explained("", write=True):
                # obstore cannot create a bucket, but it can sign the request.
                url = obstore.sign(self._store, "PUT", "", timedelta(minutes=5))
                region = os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
                kind = "CreateBucketConfiguration"
                body = f"<{kind}><LocationConstraint>{region}</LocationConstraint></{kind}>"
                data = b"" if region == "us-east-1" else body.encode()
                urlopen(Request(url, data, method="PUT"), timeout=30).close()

    def put_all(self, objects: store.Objects, receipts: Mapping[str, str] | None = None) -> None:
        """As in `Bucket`: stores all objects but the last one in parallel, and then the last one."""
        with ThreadPoolExecutor(_PARTS) as pool:
            list(pool.map(lambda each: self.put(*each), objects[:-1]))
        super().put_all(objects[-1:])

    def _read(self, key: str, limit: int) -> Iterator[bytes]:
        found = self._store.get(self._root + key)
        self._check_limit(key, size := found.meta["size"], limit)
        if size <= store.SMALL:
            yield bytes(found.bytes())
            return

        def part(start: int) -> bytes:
            end = min(start + store.SMALL, size)
            return bytes(self._store.get_range(self._root + key, start=start, end=end))

        with ThreadPoolExecutor(_PARTS) as pool:
            for first in range(0, size, _PARTS * store.SMALL):
                yield from pool.map(part, range(first, min(first + _PARTS * store.SMALL, size), store.SMALL))

    def _delete(self, keys: Sequence[str]) -> None:
        self._store.delete([self._root + key for key in keys])

    def _put(self, key: str, data: bytes | Path) -> None:
        part = max(store.SMALL, store.size_of(data) >> 12)  # S3 takes at most 10,000 parts per object
        self._store.put(self._root + key, data, chunk_size=part, max_concurrency=_PARTS)

    def _stat(self, key: str) -> store.ObjectInfo:
        """Look an object up with one request; `_explain` makes a second request if the object is absent."""
        return self._info(self._store.head(self._root + key))

    def _list(self, prefix: str) -> Iterator[store.ObjectInfo]:
        folder = self._root + prefix
        # Some tools create an object "runs/demo/". obstore lists it as "runs/demo", which is left out here.
        found = (one for page in self._store.list(folder) for one in page)
        return (self._info(one) for one in found if one["path"].startswith(folder))

    def _info(self, found: obstore.ObjectMeta) -> store.ObjectInfo:
        key = found["path"].removeprefix(self._root)
        etag = (found["e_tag"] or "").strip('"')
        return store.ObjectInfo(key, found["size"], etag, found["last_modified"].timestamp())

    def _explain(self, error: Exception, place: str, write: bool) -> errors.BucketError:
        code = _code(error)
        right = "write" if write else "read"
        missing = isinstance(error, FileNotFoundError)
        if code == "NoSuchBucket" or (missing and not self._is_there()):
            return errors.BucketMissingError(f"{self.url} does not exist: create it or correct its name")
        if missing:
            return errors.ObjectMissingError(f"{place} does not exist")
        refused = isinstance(error, PermissionDeniedError | UnauthenticatedError)
        if refused or _REFUSED.search(str(error)):
            return errors.AccessDeniedError(
                f"the store refused {right} access to {place} ({code}): set AWS_ACCESS_KEY_ID and"
                f" AWS_SECRET_ACCESS_KEY to keys with {right} access"
            )
        if isinstance(error, InvalidPathError):
            return errors.BucketError(f"{place} holds an object whose name is invalid ({error}): delete it")
        if _ROLE.search(str(error)):
            return errors.BucketUnreachableError(
                f"{place} cannot be reached, because the machine's role gives no keys now ({code}): try"
                " again, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "https://")
        proxy = proxy_for(endpoint)
        used = f"; requests use the proxy in {proxy}, unless no_proxy has the store's host" if proxy else ""
        return errors.BucketUnreachableError(
            f"{place} cannot be reached ({code}): check the network, AWS_ENDPOINT_URL and AWS_DEFAULT_REGION"
            + used
        )

    def _is_there(self) -> bool:
        """Whether the bucket exists. A missing object and a missing bucket give the same error in `head`."""
        try:
            next(iter(self._store.list(self._root, chunk_size=1)), None)
        except self._failures as error:
            return _code(error) != "NoSuchBucket"
        return True


def _code(error: Exception) -> str:
    """The store's own code for an error, such as "NoSuchBucket"; without a code, the exception's class."""
    code = re.search(r"<Code>(\w+)</Code>", str(error))
    return code[1] if code else type(error).__name__


def _profile() -> Any:
    """Return obstore's provider of a profile's keys; None if the environment has keys or no file exists."""
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    if "AWS_ACCESS_KEY_ID" in os.environ or not file.is_file():
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except Exception as error:  # such as boto3's ProfileNotFound
        raise errors.AccessDeniedError(
            f"boto3 cannot read the keys in {file} ({error}): run `pip install boto3`, set AWS_PROFILE, or"
            " set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error


def proxy_for(url: str) -> str:
    """The environment's variable with a proxy for `url`, in lower case; "" if there is none."""
    variables = f"{urlsplit(url).scheme}_proxy", "all_proxy"
    return next((each for each in variables if os.environ.get(each) or os.environ.get(each.upper())), "")
