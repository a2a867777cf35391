"""`delta-weight-sync log|show|verify|checkout BUCKET`: look at a run, prove it, take a version out of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from delta_weight_sync import checkpoint, codec
from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.history import RunReader, open_run, require_digest
from delta_weight_sync.protocol import Manifest, ProtocolError
from delta_weight_sync.store import Bucket, BucketError, open_bucket


def main(words: list[str] | None = None) -> None:
    """Run one command; a fault of the run or the bucket is one sentence on stderr and exit code 1."""
    arguments = _parser().parse_args(words)
    try:
        reader = open_run(arguments.bucket, arguments.run)
        commands = {"log": _log, "show": _show, "verify": _verify, "checkout": _checkout}
        commands[arguments.command](reader, arguments)
    except (BucketError, ProtocolError, codec.CodecError) as error:
        sys.exit(f"delta-weight-sync {arguments.command}: {error}")
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="delta-weight-sync", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "log": "list the versions of a run, newest first",
        "show": "describe one version: tensors changed, sparsity, bytes",
        "verify": "rebuild every version from version 0 and check each digest",
        "checkout": "write one version as an ordinary Hugging Face checkpoint",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "bucket", help="hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>"
        )
        command.add_argument("--run", help="name of the run (default: the only one in the bucket)")
        if name in ("show", "checkout"):
            command.add_argument("--version", type=int, help="default: the newest")
    commands.choices["checkout"].add_argument("--out", type=Path, required=True, help="folder to write")
    return parser


def _log(reader: RunReader, arguments: argparse.Namespace) -> None:
    print(f"{'version':>7}  {'published':19}  {'payload':>12}  {'changed':>9}  digest            anchor")
    for manifest in reader.history():
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(manifest.created_at))
        anchor = "yes" if manifest.anchor.version == manifest.version else ""
        share = f"{100 * (1 - manifest.sparsity):.3f} %"
        print(
            f"{manifest.version:7}  {when}  {_payload(manifest):12,}  {share:>9}  {manifest.digest}  {anchor}"
        )


def _payload(manifest: Manifest) -> int:
    files = manifest.deltas[-1:] or manifest.anchor.files
    return sum(file.size for file in files)


def _show(reader: RunReader, arguments: argparse.Namespace) -> None:
    manifest = reader.at(arguments.version)
    facts = {
        "run": manifest.run,
        "version": manifest.version,
        "digest": manifest.digest,
        "payload_bytes": _payload(manifest),
        "full_bytes": manifest.full_bytes,
        "changed": manifest.changed,
        "total": manifest.total,
        "sparsity": round(manifest.sparsity, 6),
        "anchor": manifest.anchor.version,
        "deltas_after_anchor": [delta.key for delta in manifest.deltas_after(manifest.anchor.version) or ()],
    }
    print(json.dumps(facts, indent=2))
    if manifest.deltas:
        _show_tensors(reader, manifest)


def _show_tensors(reader: RunReader, manifest: Manifest) -> None:
    with tempfile.TemporaryDirectory() as folder:
        delta = codec.Delta(reader.fetch(manifest.deltas[-1], Path(folder)))
    for number, group in enumerate(delta.groups):
        print(f"group {number}, {group.explain()}")
    print(f"{'changed':>10}  {'of':>12}  {'group':>5}  tensor")
    for tensor in delta.tensors:
        print(
            f"{tensor.changes:10,}  {tensor.numel:12,}  {tensor.group:5}  {tensor.name} {list(tensor.shape)}"
        )


def _verify(reader: RunReader, arguments: argparse.Namespace) -> None:
    manifests = sorted(reader.history(), key=lambda manifest: manifest.version)
    if not manifests:
        raise ProtocolError(
            f"run {reader.keys.run!r} in {reader.bucket.url} has not published a first version"
        )
    for manifest in _replay(reader, manifests):
        print(f"version {manifest.version} ok, digest {manifest.digest}", flush=True)
    print(f"all {len(manifests)} versions verified")


def _replay(reader: RunReader, manifests: list[Manifest]) -> Iterator[Manifest]:
    state: dict[str, Bits] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for manifest in manifests:
            if manifest.deltas:
                reader.advance(state, manifest.deltas[-1], folder)
            if manifest.anchor.version == manifest.version:
                _check_anchor(reader, manifest, folder)
                state = state or dict(checkpoint.read_bits(folder))
            require_digest(state, manifest)
            yield manifest


def _check_anchor(reader: RunReader, manifest: Manifest, folder: Path) -> None:
    for ref in manifest.anchor.files:
        reader.fetch(ref, folder)
    require_digest(dict(checkpoint.read_bits(folder)), manifest)


def _checkout(reader: RunReader, arguments: argparse.Namespace) -> None:
    manifest = reader.at(arguments.version)
    reader.checkout(manifest, arguments.out)
    print(f"version {manifest.version} (digest {manifest.digest}) is in {arguments.out}")
