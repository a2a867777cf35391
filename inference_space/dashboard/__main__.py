"""`python -m inference_space.dashboard --bucket URL`: watch a run from anywhere, or export it as a folder."""

import argparse
import socket
import sys
from pathlib import Path

from fastapi import FastAPI

from delta_weight_sync.errors import DeltaWeightSyncError
from delta_weight_sync.reader import split_run
from delta_weight_sync.records import Keys
from delta_weight_sync.store import Bucket, open_bucket
from inference_space.dashboard.export import export
from inference_space.dashboard.page import mount
from inference_space.dashboard.remote import RemoteReplica
from space_guard.serving import serve


def main() -> None:
    """Serve the dashboard until interrupted, or write it to a folder."""
    parser = argparse.ArgumentParser(prog="python -m inference_space.dashboard", description=__doc__)
    add = parser.add_argument
    add("--bucket", required=True, metavar="URL", help="hf://, s3:// or file://; #<run> names the run")
    add("--run", help="the run to show (default: the one created last)")
    add("--compare", default="", metavar="RUN", help="also draw the curves of this run")
    add("--replicas", nargs="*", default=(), metavar="URL", help="replicas to ask for their versions")
    add("--export", type=Path, metavar="FOLDER", help="write the run as a static page, and exit")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="default: any free port")
    args = parser.parse_args()
    place, named = split_run(args.bucket)
    run = args.run or named or None
    if named not in ("", run):
        sys.exit(f"dashboard: --bucket names run {named!r}, and --run names {run!r}: name one")
    try:
        bucket = open_bucket(place)
        if args.export:
            print(export(bucket, run, args.export))
            return
        if args.compare and bucket.stat(Keys(args.compare).info) is None:
            sys.exit(f"dashboard: --compare: {place} holds no run {args.compare!r}")
        listening = socket.create_server((args.host, args.port))
        _say_if_unreadable(bucket)
    except (DeltaWeightSyncError, OSError) as error:
        sys.exit(f"dashboard: {error}")
    reports = [RemoteReplica(url) for url in args.replicas]
    app = mount(FastAPI(), bucket, run, reports=reports, compare=args.compare)
    with listening:
        print(f"http://{args.host}:{listening.getsockname()[1]}/", flush=True)
        # An open page holds a connection that never ends by itself, so a stop waits only 1 s for connections.
        serve(app, [listening], log_level="warning", timeout_graceful_shutdown=1)


def _say_if_unreadable(bucket: Bucket) -> None:
    """A trainer may yet create the bucket, so the page waits for it; but perhaps the URL is wrong."""
    try:
        bucket.stat(Keys("any").info)
    except DeltaWeightSyncError as error:
        print(f"dashboard: {error}. The page waits for it.", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
