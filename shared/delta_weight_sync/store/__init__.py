"""The stores: a Hugging Face bucket, S3, or a folder, behind one small interface."""

from __future__ import annotations

from delta_weight_sync.store.base import (
    AccessDenied,
    Bucket,
    BucketError,
    BucketMissing,
    BucketUnreachable,
    Listing,
    ObjectInfo,
    ObjectMissing,
)

__all__ = [
    "AccessDenied",
    "Bucket",
    "BucketError",
    "BucketMissing",
    "BucketUnreachable",
    "Listing",
    "ObjectInfo",
    "ObjectMissing",
    "open_bucket",
]


def open_bucket(url: str, *, create: bool = False) -> Bucket:
    """The bucket at `url`: hf://buckets/<owner>/<name>[/<prefix>], s3://<name>[/<prefix>] or file:///<path>.

    Without `create` nothing is contacted, and a missing bucket shows at the first use. `create` makes the
    bucket where it does not exist yet (on the Hub a private one).
    """
    # A machine needs the libraries of its own backend only.
    if url.startswith("hf://"):
        from delta_weight_sync.store.hub import HubBucket

        return HubBucket(url, create=create)
    if url.startswith("s3://"):
        from delta_weight_sync.store.s3 import S3Bucket

        return S3Bucket(url, create=create)
    if url.startswith("file:///"):
        from delta_weight_sync.store.files import FileBucket

        return FileBucket(url, create=create)
    raise BucketError(
        f"{url!r} is not the URL of a bucket: write hf://buckets/<owner>/<name>, s3://<name> or file:///<path>"
    )
