"""The commands log, show, verify, checkout, blame, gc and keygen.

The codec is imported only by the commands that decode deltas.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from delta_weight_sync import checkpoint
from delta_weight_sync.checkpoint import Bits
from delta_weight_sync.errors import NoVersionError, ProtocolError, printable
from delta_weight_sync.reader import RunReader, checkpoint_errors, open_run, require_digest
from delta_weight_sync.records import DeltaRef, Manifest
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, make_keys

Parser = argparse.ArgumentParser
Arguments = argparse.Namespace
_BLAMED: Final = 20  # tensors that `blame` lists
_BLAME: Final = """\
For each tensor: how many of its weights changed, their share, and how far they moved in units of the last
place of bf16. Compare with another version of the run to find what is wrong: a tensor that changed
completely, or weights that moved far."""
_GC: Final = """\
The oldest versions go first. These always stay: all files that the newest version's manifest names, the
files that versions of the last hour before it need, and objects younger than that. So you can run it while a
trainer and replicas use the run. A deleted version can no longer be checked out, pinned or verified.

A trainer deletes old versions itself with Publisher(..., keep="20GB")."""
_KEYGEN: Final = f"""\
FILE holds {SIGNING_KEY} and {PUBLIC_KEY}, and only you can read it. The trainer
needs both, replicas and other readers only the second:

  set -a; . FILE; set +a"""


def configure(parser: Parser, name: str) -> None:
    """Add the arguments of the command `name`, and the function that runs it."""
    if name == "keygen":
        parser.add_argument("file", type=Path, metavar="FILE", help="file to write; it must not exist")
        parser.epilog = _KEYGEN
        parser.set_defaults(run=lambda arguments: print(f"{PUBLIC_KEY}={make_keys(arguments.file)}"))
        return
    runs = {"log": _log, "show": _show, "verify": _verify, "checkout": _checkout, "blame": _blame, "gc": _gc}
    parser.set_defaults(run=runs[name])
    add_run(parser)
    if name in ("show", "checkout"):
        parser.add_argument("--version", type=int, metavar="N", help="default: the newest")
    if name == "checkout":
        parser.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="folder to write")
    elif name == "blame":
        parser.add_argument("version", type=int, metavar="VERSION", help="its number")
        parser.epilog = _BLAME
    elif name == "gc":
        keep = "how much to keep: 20GB, 500MB, 7d or 12h"
        parser.add_argument("--keep", metavar="SIZE|AGE", required=True, help=keep)
        parser.add_argument("--dry-run", action="store_true", help="print what would be deleted, and why")
        parser.epilog = _GC


def add_run(parser: Parser) -> None:
    """Add `RUN` and `--run`."""
    parser.add_argument(
        "url",
        metavar="RUN",
        help="hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>; add #<run> if the bucket"
        " holds several runs",
    )
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="name of the run, instead of #<run>")


def opened(arguments: Arguments) -> RunReader:
    """The run that the arguments name."""
    return open_run(arguments.url, arguments.run_name)


def run_in_shell(command: str, path: Path, manifest: Manifest) -> int:
    """Run the user's command for a version and return its exit code.

    {path}, {version} and {digest} are replaced by the version's, quoted for the shell. If a signal ended the
    command, the code is negative or above 128.
    """
    values = {"path": str(path), "version": str(manifest.version), "digest": manifest.digest}
    filled = re.sub(r"\{(path|version|digest)\}", lambda match: shlex.quote(values[match[1]]), command)
    return subprocess.run(filled, shell=True).returncode


def utc(t: float) -> str:
    """Unix seconds as a date and time of 19 characters; question marks if no calendar has it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))
    except (OverflowError, ValueError, OSError):
        return "????-??-?? ??:??:??"


def _payload(manifest: Manifest) -> int:
    """Bytes that a version added to the bucket: its delta, or the files of version 0."""
    return sum(file.size for file in manifest.deltas[-1:] or manifest.anchor.files)


def _print_deleted(oldest: Manifest) -> None:
    if oldest.parent:
        print(f"older versions were deleted; {oldest.version} is the oldest available")


def _log(arguments: Arguments) -> None:
    reader = opened(arguments)
    manifest: Manifest | None = reader.manifest()
    print(f"{'version':>7}  {'published':19}  {'payload':>12}  {'changed':>9}  digest            anchor")
    while manifest:
        anchor = "yes" if manifest.anchor.version == manifest.version else ""
        share = f"{100 * (1 - manifest.sparsity):.3f} %"
        place = f"{manifest.version:7}  {utc(manifest.created_at)}"
        print(f"{place}  {_payload(manifest):12,}  {share:>9}  {manifest.digest}  {anchor}")
        oldest, manifest = manifest, reader.parent(manifest)
    _print_deleted(oldest)


def _show(arguments: Arguments) -> None:
    from delta_weight_sync.codec import Delta

    reader = opened(arguments)
    manifest = reader.manifest(arguments.version)
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
        "way": [file.key for file in manifest.recipe().files],
    }
    print(json.dumps(facts, indent=2))
    if not manifest.deltas:
        return
    with tempfile.TemporaryDirectory() as folder:
        delta = Delta(reader.fetch(manifest.deltas[-1], Path(folder)))
    for number, group in enumerate(delta.groups):
        print(f"group {number}, {printable(group.explain())}")
    print(f"{'changed':>10}  {'of':>12}  {'group':>5}  tensor")
    for tensor in delta.tensors:
        name = printable(tensor.name)
        print(f"{tensor.changes:10,}  {tensor.numel:12,}  {tensor.group:5}  {name} {list(tensor.shape)}")


def _verify(arguments: Arguments) -> None:
    """Rebuild every version, oldest first; end at the first that is not what was published."""
    reader = opened(arguments)
    reader.require_intact()
    manifests = [reader.manifest()]
    while older := reader.parent(manifests[-1]):
        manifests.append(older)
    manifests.reverse()
    with tempfile.TemporaryDirectory() as folder:
        for manifest in _verified(reader, manifests, Path(folder)):
            print(f"version {manifest.version} ok, digest {manifest.digest}", flush=True)
    _print_deleted(manifests[0])
    print(f"all {len(manifests)} versions verified")


def _verified(reader: RunReader, manifests: list[Manifest], folder: Path) -> Iterator[Manifest]:
    """Build each version by its own delta, and check every anchor and jump on the way.

    The oldest and the newest version are also built as a joining replica builds them.
    """
    by_version = {manifest.version: manifest for manifest in manifests}
    anchors = {manifest.anchor.version: manifest.anchor for manifest in manifests}
    used = (delta for manifest in manifests for delta in manifest.recipe().deltas)
    jumps = {delta.key: delta for delta in (*used, *manifests[-1].jumps) if delta.version - delta.base > 1}
    state: dict[str, Bits] = {}
    for manifest in manifests:
        if state and manifest.deltas:
            reader.apply(state, manifest.deltas[-1], folder)
            require_digest(state, manifest)
        else:
            state = reader.checkout(manifest, folder)
        if anchor := anchors.get(manifest.version):
            for ref in anchor.files:
                reader.fetch(ref, folder)
            with checkpoint_errors(anchor):
                bits = checkpoint.map_bits(folder / checkpoint.WEIGHTS)
            require_digest(bits, manifest)
        for jump in jumps.values():
            if jump.base == manifest.version:
                _verify_jump(reader, jump, state, by_version[jump.version], folder)
        yield manifest
    reader.checkout(manifests[-1], folder)


def _verify_jump(
    reader: RunReader, jump: DeltaRef, state: dict[str, Bits], target: Manifest, folder: Path
) -> None:
    copy = {name: bits.copy() for name, bits in state.items()}
    reader.apply(copy, jump, folder)
    require_digest(copy, target)


def _checkout(arguments: Arguments) -> None:
    reader = opened(arguments)
    manifest = reader.manifest(arguments.version)
    reader.checkout(manifest, arguments.out)
    print(f"version {manifest.version} (digest {manifest.digest}) is in {arguments.out}")


def _blame(arguments: Arguments) -> None:
    """Print a line for each of the tensors of which the largest shares changed."""
    from delta_weight_sync.codec import ULP_CLASSES, Delta, count_ulps

    reader = opened(arguments)
    manifest = reader.find(arguments.version)
    if not manifest.deltas:
        raise ProtocolError(
            f"version {manifest.version} was published as an anchor only, so no delta shows its changes"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        delta = Delta(reader.fetch(manifest.deltas[-1], folder))
        # The version before is fetched only if the delta is coded against it.
        before = functools.cache(
            lambda: reader.checkout(reader.find(manifest.version - 1), folder / "before")
        )
        patches = delta.patches({t.name: t.shape for t in delta.tensors}, lambda name: before()[name])
        tensors = [(p.index.size / p.numel, p.index.size, p.name, p.shape, count_ulps(p)) for p in patches]
    tensors.sort(key=lambda tensor: tensor[:4], reverse=True)
    changed = f"{manifest.changed:,} weights of {manifest.total:,}, {100 * (1 - manifest.sparsity):.3f} %"
    print(f"version {manifest.version} changed {changed}")
    if tensors:
        classes = "".join(f"{name:>10}" for name in ULP_CLASSES[1:])
        print(f"{'changed':>10}  {'share':>8}  {'ULPs':>10}{classes}  tensor")
    for share, count, name, shape, moved in tensors[:_BLAMED]:
        counts, percent = "".join(f"{number:>10,}" for number in moved), f"{100 * share:.3f} %"
        print(f"{count:>10,}  {percent:>8}  {counts}  {printable(name)} {list(shape)}")
    if len(tensors) > _BLAMED:
        print(f"{len(tensors) - _BLAMED} more tensors changed by smaller shares")


def _gc(arguments: Arguments) -> None:
    from delta_weight_sync.prune import Keep, Pruner, prune
    from delta_weight_sync.util import size_text

    reader, keep = opened(arguments), Keep.parse(arguments.keep)
    survey = Pruner(reader, keep).survey()
    if survey is None:
        raise NoVersionError(
            f"run {reader.keys.run!r} in {reader.bucket.url} has not published a first version"
        )
    if arguments.dry_run:
        for info, why in survey.delete:
            print(f"{info.size:>14,}  {printable(info.key)}  {why}")
    else:
        prune(reader.bucket, survey)
    done = "would be deleted" if arguments.dry_run else "deleted"
    stay = f"versions {survey.oldest} to {survey.newest} stay, {size_text(survey.kept)}"
    if survey.kept > keep.size:
        stay += f", which is more than {keep}: the newest version and the last hour need it"
    print(f"{len(survey.delete)} objects {done}, {size_text(survey.freed)}; {stay}")
