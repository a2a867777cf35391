"""`python -m inference_space.dashboard --bucket URL`: watch a run from anywhere, or export it as a folder."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from delta_weight_sync.codec import CodecError
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import Bucket, BucketError, open_bucket
from inference_space.dashboard.export import export
from inference_space.dashboard.mount import mount
from inference_space.ending import exit_when_asked


def main() -> None:
    """Serve the dashboard until interrupted, or write it to a folder."""
    args = _arguments()
    if args.export:
        _export(args)
        return
    app = mount(FastAPI(), args.bucket, args.run)
    with socket.create_server((args.host, args.port)) as listening:
        print(f"http://{args.host}:{listening.getsockname()[1]}/", flush=True)
        # An open page holds a connection that would never end by itself.
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        exit_when_asked()
        uvicorn.Server(config).run(sockets=[listening])


def _export(args: argparse.Namespace) -> None:
    try:
        print(export(args.bucket, args.run, args.export))
    except (BucketError, ProtocolError, CodecError) as error:
        sys.exit(f"dashboard: {error}")


def _bucket(url: str) -> Bucket:
    try:
        return open_bucket(url)
    except BucketError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m inference_space.dashboard", description=__doc__)
    parser.add_argument(
        "--bucket", required=True, type=_bucket, metavar="URL", help="hf://, s3:// or file://"
    )
    parser.add_argument("--run", help="the run to show (default: the one created last)")
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="write the run as a static page, and serve nothing"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
