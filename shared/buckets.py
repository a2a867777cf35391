"""Which store a URL means."""

from __future__ import annotations

from shared.bucket import Bucket, BucketError


def open_bucket(url: str, *, create: bool = False) -> Bucket:
    """The bucket at `url`: hf://buckets/<owner>/<name>[/<prefix>], s3://<name>[/<prefix>] or file:///<path>.

    Without `create` nothing is contacted, and a missing bucket shows at the first use. `create` makes the
    bucket where it does not exist yet (on the Hub a private one).
    """
    # A machine needs the libraries of its own backend only.
    if url.startswith("hf://"):
        from shared.hub_bucket import HubBucket

        return HubBucket(url, create=create)
    if url.startswith("s3://"):
        from shared.s3_bucket import S3Bucket

        return S3Bucket(url, create=create)
    if url.startswith("file:///"):
        from shared.fs_bucket import FileBucket

        return FileBucket(url, create=create)
    raise BucketError(
        f"{url!r} is not the URL of a bucket: write hf://buckets/<owner>/<name>, s3://<name> or file:///<path>"
    )
