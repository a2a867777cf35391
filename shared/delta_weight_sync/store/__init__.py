"""The stores: a Hugging Face bucket, S3, or a folder, behind one small interface.

`open_bucket` opens one by its URL:

    bucket = open_bucket("hf://buckets/team/policies/wordle")
    bucket.put("runs/demo/run.json", b"...")
"""

from __future__ import annotations

from delta_weight_sync.errors import BucketError, MissingExtraError
from delta_weight_sync.store._base import Bucket, Listing, ObjectInfo

__all__ = ["Bucket", "Listing", "ObjectInfo", "open_bucket"]


def open_bucket(url: str, *, create: bool = False) -> Bucket:
    """Open the bucket at `url`.

    Args:
        url: `hf://buckets/<owner>/<name>[/<prefix>]`, `s3://<name>[/<prefix>]` or `file:///<path>`.
        create: Create the bucket if it is missing (on the Hub a private one). Otherwise no request is made
            here, and a missing bucket is an error at its first use.

    Raises:
        BucketError: The URL is not one of these forms, or the bucket cannot be created.
    """
    # Import only what the store needs: other stores' libraries may be missing.
    if url.startswith("hf://"):
        from delta_weight_sync.store.hub import HubBucket

        return HubBucket(url, create=create)
    if url.startswith("s3://"):
        try:
            from delta_weight_sync.store._s3 import S3Bucket
        except ModuleNotFoundError as error:
            raise MissingExtraError("an s3:// URL", "s3", error) from error
        return S3Bucket(url, create=create)
    if url.startswith("file:///"):
        from delta_weight_sync.store._files import FileBucket

        return FileBucket(url, create=create)
    raise BucketError(
        f"{url!r} is not the URL of a bucket: write hf://buckets/<owner>/<name>, s3://<name> or file:///<path>"
    )
