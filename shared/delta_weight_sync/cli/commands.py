"""All commands except plan and doctor. The codec is imported only when needed, because it loads slowly."""

import argparse
import functools
import inspect
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from delta_weight_sync.checkout import FollowedVersion, build, follow
from delta_weight_sync.cli.parts import URLS, add_run, opened, print_rows, version_or_tag
from delta_weight_sync.cli.shell import ended_by_signals, run_in_shell
from delta_weight_sync.errors import (
    CommandError,
    FolderError,
    ObjectMissingError,
    ProtocolError,
    printable,
    sentence,
)
from delta_weight_sync.evaluation import scores_of
from delta_weight_sync.prune import Keep, Pruner, prune
from delta_weight_sync.reader import Problems, RunReader, manifests_of, runs_in
from delta_weight_sync.records import Keys, Manifest
from delta_weight_sync.run import Run
from delta_weight_sync.runlog import RunLogReader, ScoreEvent, SyncEvent, TrafficEvent
from delta_weight_sync.scratch import Scratch
from delta_weight_sync.signing import PUBLIC_KEY, make_keys
from delta_weight_sync.store import open_bucket
from delta_weight_sync.traffic import TrafficSum
from delta_weight_sync.util import size_text

Arguments = argparse.Namespace
_BLAMED: Final = 20  # max tensors that `blame` lists, except with --json
_UNKNOWN: Final = 125  # exit code of a command that cannot judge a version
_NOT_STARTED: Final = (126, 127)  # the shell's codes for a program that is missing or not executable


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the arguments and the function of the command `name`. The function's docstring ends the help."""
    run = _COMMANDS[name]
    parser.epilog = inspect.getdoc(run)
    parser.set_defaults(run=run)
    add = parser.add_argument
    if name == "keygen":
        add("file", type=Path, metavar="FILE", help="file to write; it must not exist")
        return
    if name == "runs":
        add("url", metavar="BUCKET", help=URLS)
    else:
        add_run(parser)
    if name in ("runs", "log", "show", "blame", "verify"):
        add("--json", action="store_true", help="print JSON")
    if name in ("show", "checkout", "blame"):
        text = "number or tag of the version (default: the newest)"
        add("--version", type=version_or_tag, metavar="VERSION", help=text)
    if name == "verify":
        text = "rebuild only this version, a number or a tag (default: all)"
        add("--version", type=version_or_tag, metavar="VERSION", help=text)
    if name == "log":
        add("-n", "--last", type=int, metavar="N", help="list only the newest N versions")
        add("--bytes", action="store_true", help="print what the run has sent and requested, by kind")
        add("--scores", action="store_true", help="list the scores of `evaluate`, oldest version first")
    elif name == "checkout":
        add("--out", type=Path, metavar="DIR", required=True, help="folder to write; it must be empty or new")
        add("--force", action="store_true", help="replace the checkout in DIR")
    elif name == "bisect":
        judge = parser.add_mutually_exclusive_group(required=True)
        judge.add_argument("--eval", metavar="COMMAND", help="command that judges a version")
        text = "a score that `evaluate` wrote, such as eval/accuracy; `log --scores` lists them"
        judge.add_argument("--score", metavar="NAME", help=text)
        limit = parser.add_mutually_exclusive_group()
        text = "with --score: versions with a {} score are bad"
        limit.add_argument("--below", type=float, metavar="LIMIT", help=text.format("lower"))
        limit.add_argument("--above", type=float, metavar="LIMIT", help=text.format("higher"))
        good = "a number or tag of a version that is good (default: the oldest)"
        bad = "a number or tag of a later version that is bad (default: the newest)"
        add("--good", type=version_or_tag, metavar="VERSION", help=good)
        add("--bad", type=version_or_tag, metavar="VERSION", help=bad)
    elif name == "follow":
        add("--into", type=Path, metavar="DIR", required=True, help="folder to write")
        add("--on-version", metavar="COMMAND", default="", help="command to run for each new version")
        add("--once", action="store_true", help="exit when DIR holds the newest version; for a cron job")
    elif name == "gc":
        keep = "how much to keep: 20GB, 500MB, 7d or 12h"
        add("--keep", metavar="SIZE|AGE", required=True, help=keep)
        add("--dry-run", action="store_true", help="print what would be deleted, and why")


def _payload(manifest: Manifest) -> int:
    """Bytes that a version added to the bucket: its delta or, without a delta, its anchor."""
    return sum(file.size for file in manifest.delta or manifest.anchor.files)


def _print_deleted(oldest: Manifest) -> None:
    if oldest.parent:
        print(f"older versions were deleted; {oldest.version} is the oldest available")


def _when(manifest: Manifest) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(manifest.created_at))


def _runs(arguments: Arguments) -> None:
    bucket = open_bucket(arguments.url)
    problems: Problems = {}

    def rows() -> Iterator[dict[str, Any]]:
        for run in runs_in(bucket):
            size = sum(info.size for info in bucket.list(Keys(run).folder))
            facts: dict[str, Any] = {}
            try:
                if newest := RunReader(bucket, run).newest():
                    facts = {"newest": newest.version, "published": _when(newest)}
            except (ProtocolError, ObjectMissingError) as error:  # such as one that no trusted key signed
                problems[run] = error
                facts = {"problem": str(error)}
            yield {"newest": "", "published": ""} | facts | {"size": size, "run": run}

    print_rows("{newest:>7}  {published:19}  {size:>8}  {run}", rows(), arguments.json)
    for run, error in problems.items():
        if not arguments.json:
            print(f"{run} is not read: {printable(str(error))}")


def _log(arguments: Arguments) -> None:
    """With --bytes, list instead what trainers have sent and replicas have received after version 0, and how
    many requests that took, as the run's log says. A headline sums up what a version takes.
    """
    if arguments.bytes:
        _print_traffic(opened(arguments), arguments.json)
        return
    reader = opened(arguments)
    if arguments.scores:
        _print_scores(reader, arguments.json)
        return
    anchors = set[int]()
    manifest = reader.manifest()  # the others are read one by one, because all of them could fill the memory

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal manifest
        for count in itertools.count():
            if arguments.last and count >= arguments.last:
                return
            anchors.add(manifest.anchor.version)  # newest first, so the anchor's own row comes later
            older = reader.parent(manifest)
            # If the trainer resumed from an earlier state, `older` may have a later sync than `manifest`.
            first = min(older.sync + 1, manifest.sync) if older else manifest.sync
            yield {
                "version": manifest.version,
                "published": _when(manifest),
                "syncs": f"{first}-{manifest.sync}" if first < manifest.sync else f"{manifest.sync}",
                "payload": _payload(manifest),
                "changed": 1 - manifest.sparsity if manifest.delta or arguments.json else "all",
                "digest": manifest.digest,
                "anchor": manifest.version in anchors,
            }
            if older is None:
                return
            manifest = older

    columns = "{version:>7}  {published:19}  {syncs:>9}  {payload:>8}  {changed:>9}  {digest:16}  {anchor}"
    print_rows(columns, rows(), arguments.json)
    if not (arguments.json or arguments.last):
        _print_deleted(manifest)


def _print_scores(reader: RunReader, as_json: bool) -> None:
    rows = [
        {"version": event.version, "score": f"{event.name}/{name}", "value": f"{value:.6g}"}
        for event in sorted(scores_of(reader), key=lambda event: event.version)
        for name, value in event.scores.items()
    ]
    print_rows("{version:>7}  {value:>12}  {score}", rows, as_json)


def _print_traffic(reader: RunReader, as_json: bool) -> None:
    programs = TrafficSum()
    versions = 0
    full_bytes = 0
    for event in RunLogReader(reader.bucket, reader.keys.run).poll():
        if isinstance(event, TrafficEvent):
            programs.add(event)
        elif isinstance(event, SyncEvent):
            full_bytes = event.full_bytes
            versions += event.version > 0
    traffic = programs.total()
    if as_json:
        print(json.dumps({"versions": versions, "full_bytes": full_bytes, **traffic.as_dict()}))
        return
    each = traffic.sync_bytes / versions if versions else 0.0
    print("\n".join(traffic.table(versions)))
    if each:
        times = f"{full_bytes / each:.3g} times less than all weights"
        print(f"a version takes {size_text(each)} on average, without states: {times}")


def _show(arguments: Arguments) -> None:
    from delta_weight_sync.codec import Delta

    reader = opened(arguments)
    manifest = reader.manifest(arguments.version)
    facts = manifest.model_dump(include={"run", "version", "digest", "changed", "total", "full_bytes"}) | {
        "payload_bytes": _payload(manifest),
        "sparsity": round(manifest.sparsity, 6),
        "anchor": manifest.anchor.version,
        "recipe": [file.key for file in manifest.recipe().files],
    }
    groups = list[str]()
    tensors = list[dict[str, Any]]()
    with Scratch() as folder:
        for delta in map(Delta, reader.fetch_all(manifest.delta, folder)):
            before = len(groups)
            groups += [group.explain() for group in delta.groups]
            for row in delta.tensors:
                tensor = {"group": before + row.group, "tensor": f"{row.name} {list(row.shape)}"}
                tensors.append({"changed": row.changes, "of": row.numel} | tensor)
    if arguments.json:
        print(json.dumps(facts | {"groups": groups, "tensors": tensors}, indent=2))
        return
    for name, value in facts.items():
        print(f"{name:13}  {printable('  '.join(value) if isinstance(value, list) else str(value))}")
    for number, group in enumerate(groups):
        print(f"group {number}, {printable(group)}")
    if tensors:
        print_rows("{changed:>10}  {of:>12}  {group:>5}  {tensor}", tensors, as_json=False)


def _verify(arguments: Arguments) -> None:
    """Rebuild every version, oldest first. Stop with an error if a version differs from the published one."""
    oldest: Manifest | None = None
    count = 0
    for manifest in Run(arguments.url, arguments.run_name).verify(arguments.version):
        oldest = oldest or manifest
        count += 1
        facts = {"version": manifest.version, "digest": manifest.digest}
        text = f"version {manifest.version} ok, digest {manifest.digest}"
        print(json.dumps(facts) if arguments.json else text, flush=True)
    if oldest and arguments.version is None and not arguments.json:
        _print_deleted(oldest)
        print(f"all {count} versions verified")


def _checkout(arguments: Arguments) -> None:
    run = Run(arguments.url, arguments.run_name)
    out = arguments.out
    if not arguments.force and out.is_dir() and any(out.iterdir()):
        raise FolderError(f"{out} is not empty: name a new folder, or replace a checkout there with --force")
    manifest = run.checkout(out, arguments.version)
    print(f"version {manifest.version} (digest {manifest.digest}) is in {out}")


def _blame(arguments: Arguments) -> None:
    """For each tensor, the columns show how many of its weights changed, their share, and how far they moved
    in units in the last place (ULPs) of bf16. Compare the columns with those of another version. Signs of
    an error are a tensor of which all weights changed, and weights that moved far.
    """
    from delta_weight_sync.codec import ULP_CLASSES, Delta, count_ulps

    reader = opened(arguments)
    manifest = reader.manifest(arguments.version)
    if not manifest.delta:
        what = f"version {manifest.version} was published as a whole checkpoint, without a delta"
        raise ProtocolError(f"{what}: name a later version, whose delta shows what changed")
    with Scratch() as folder:
        deltas = [*map(Delta, reader.fetch_all(manifest.delta, folder))]
        # Fetch the previous version only if the delta's encoding needs the bits before the change.
        old = functools.cache(
            lambda: reader.checkout(reader.manifest(manifest.version - 1), folder / "before")
        )
        tensors = [
            (patch.index.size / patch.numel, patch.index.size, patch.name, patch.shape, count_ulps(patch))
            for delta in deltas
            for patch in delta.patches({t.name: t.shape for t in delta.tensors}, lambda name: old()[name])
        ]
    tensors.sort(key=lambda tensor: tensor[:4], reverse=True)
    classes = [f"ULPs {name}" for name in ULP_CLASSES]
    rows = [
        {"changed": count, "share": share, **dict(zip(classes, map(int, moved), strict=True))}
        | {"tensor": f"{name} {list(shape)}"}
        for share, count, name, shape, moved in (tensors if arguments.json else tensors[:_BLAMED])
    ]
    if not arguments.json:
        changed = f"{manifest.changed:,} weights of {manifest.total:,}, {100 * (1 - manifest.sparsity):.3f} %"
        print(f"version {manifest.version} changed {changed}")
    columns = "  ".join(["{changed:>10}", "{share:>9}", *(f"{{{name}:>11}}" for name in classes), "{tensor}"])
    print_rows(columns, rows, arguments.json)
    if len(tensors) > _BLAMED and not arguments.json:
        print(f"{len(tensors) - _BLAMED} more tensors changed, by equal or smaller shares")


def _bisect(arguments: Arguments) -> None:
    """COMMAND runs in a shell, once for each version that is tried. {path} becomes a folder with the version
    as an ordinary checkpoint, {version} its number, and {digest} its digest, each quoted for the shell.
    The exit code of COMMAND is the verdict, as with `git bisect run`:

      0 good     1 to 124 bad     125 unknown: another version is tried     any other ends the search

      delta-weight-sync bisect RUN --eval 'python evaluate.py {path} --at-least 0.6'

    COMMAND runs about log2(number of versions) times. Without --bad, the newest version is judged first and
    must be bad. Then, without --good, the oldest version is judged and must be good.

    With --score, nothing runs: the first version is named whose score in the log is below or above a limit.

      delta-weight-sync bisect RUN --score eval/accuracy --below 0.6
    """
    if arguments.score is not None:
        _bisect_scores(arguments)
        return
    if arguments.below is not None or arguments.above is not None:
        raise CommandError("--below and --above are limits of a score: name it with --score")
    if not any(word in arguments.eval for word in ("{path}", "{version}", "{digest}")):
        raise CommandError("--eval is the same for all versions: use {path}, {version} or {digest} in it")
    # version -> good, bad, or unknown
    reader = opened(arguments)
    verdicts = dict[int, bool | None]()
    listed = sorted(manifests_of(reader.bucket.list(reader.keys.manifests)))
    bad = reader.manifest(arguments.bad).version
    good = min(listed, default=0) if arguments.good is None else reader.manifest(arguments.good).version
    if good >= bad:
        raise CommandError(f"nothing lies between good {good} and bad {bad}: --bad must be a later version")
    held: FollowedVersion | None = None  # the last good version; later versions are built from it
    with Scratch() as folder:
        # The user vouches for a named end. Any other end is judged before the versions between the ends.
        ends = [bad] * (arguments.bad is None) + [good] * (arguments.good is None)
        while left := ends or [each for each in listed if good < each < bad and each not in verdicts]:
            version = left.pop(0) if ends else left[len(left) // 2]
            manifest = reader.manifest(version)
            built = FollowedVersion(manifest, folder / f"{version:08d}")
            build(reader, manifest, built.path, held)
            verdict = verdicts[version] = _judge(arguments.eval, built)
            word = "unknown" if verdict is None else "good" if verdict else "bad"
            print(f"version {version}: {word}", flush=True)
            superseded, held = (held, built) if verdict else (built, held)
            if superseded:
                shutil.rmtree(superseded.path)
            if version == bad and verdict is not False:
                raise CommandError(f"the newest version, {bad}, was not judged bad: there is nothing to find")
            if version == good and not verdict:
                raise CommandError(
                    f"the oldest version, {good}, was not judged good: name a good version with --good"
                )
            good = version if verdict else good
            bad = version if verdict is False else bad
    if good + 1 < bad and not any(good < version < bad for version in listed):
        raise CommandError(
            f"the first bad version is in the range {good + 1} to {bad}: the versions between were deleted"
        )
    if good + 1 < bad:
        raise CommandError(
            f"the first bad version is in the range {good + 1} to {bad}: your command could not judge any"
            f" version of this range before {bad} (exit code 125)"
        )
    print(f"version {bad} is the first bad one; {len(verdicts)} versions were judged")
    place = printable(f"{reader.bucket.url}#{reader.keys.run}")
    print(f"to see what changed there: delta-weight-sync blame {place} --version {bad}")


def _bisect_scores(arguments: Arguments) -> None:
    """Name the first version whose score is beyond the limit, between --good and --bad."""
    below = arguments.below
    above = arguments.above
    if below is None and above is None:
        raise CommandError("--score needs a limit: add --below or --above")
    reader = opened(arguments)
    first = 0 if arguments.good is None else reader.manifest(arguments.good).version
    last = math.inf if arguments.bad is None else reader.manifest(arguments.bad).version
    names = set[str]()
    scores = dict[int, float]()
    for event in scores_of(reader):
        named = {f"{event.name}/{name}": value for name, value in event.scores.items()}
        names |= named.keys()
        if arguments.score in named and first <= event.version <= last and _is_current(reader, event):
            scores[event.version] = named[arguments.score]
    if arguments.score not in names:
        known = ", ".join(sorted(names)) or "none, so run `evaluate` first"
        raise CommandError(f"the log has no score {arguments.score!r}: the scores are {known}")
    before: int | None = None
    word = f"below {below:g}" if above is None else f"above {above:g}"
    for version, score in sorted(scores.items()):
        if score < below if above is None else score > above:
            print(f"version {version} is the first with {printable(arguments.score)} {word}: {score:.6g}")
            place = printable(f"{reader.bucket.url}#{reader.keys.run}")
            if before is None:
                print("no earlier version has this score")
            else:
                print(f"version {before} had {scores[before]:.6g}")
                if before + 1 < version:
                    ends = f"--good {before} --bad {version}"
                    print(f"to judge those between: delta-weight-sync bisect {place} {ends} --eval COMMAND")
            print(f"to see what changed there: delta-weight-sync blame {place} --version {version}")
            return
        before = version
    raise CommandError(f"none of {len(scores)} versions with a score {arguments.score} is {word}")


def _is_current(reader: RunReader, score: ScoreEvent) -> bool:
    """Whether the score is that of the version of now: a trainer that starts over publishes other weights."""
    try:
        return reader.manifest(score.version).digest == score.digest
    except ProtocolError:  # deleted: its score still counts
        return True


def _judge(command: str, version: FollowedVersion) -> bool | None:
    """Whether a version is good, or None if the user's command does not know. Raises `CommandError`."""
    code = run_in_shell(command, version.path, version.manifest)
    if code in _NOT_STARTED:
        raise CommandError(f"--eval could not be started (exit code {code}): try it in a shell on a checkout")
    if not 0 <= code <= _UNKNOWN:
        expected = "expected 0 (good), 1 to 124 (bad) or 125 (unknown)"
        raise CommandError(f"--eval returned exit code {code} for version {version.version}; {expected}")
    return None if code == _UNKNOWN else code == 0


def _follow(arguments: Arguments) -> None:
    r"""DIR/current is a link to the newest version's folder, such as DIR/00000041. The link is replaced in
    one step, after the new folder is complete and its digest is verified. A complete folder is never written
    again. The previous version stays until the build of the next one begins. If an object is damaged or the
    bucket is unreachable, the command says so and, without --once, keeps trying; DIR/current does not change.
    You can kill the command at any moment. The next start keeps the version in DIR if its files are intact.

    COMMAND runs in a shell after each new version, and the next version waits for it. If COMMAND failed or
    did not run for the version in DIR, the next start runs it. {path} becomes the version's own folder,
    {version} its number, and {digest} its digest. They are already quoted, so close your own quotation marks
    before a placeholder and reopen them after it, as in this call of SGLang:

      --on-version "curl -f localhost:30000/update_weights_from_disk --json '{\"model_path\": \"'{path}'\"}'"

    Ctrl-C ends the command with exit code 130, SIGTERM with 0, in both cases within five seconds.
    """
    into = arguments.into
    once = arguments.once
    run = Run(arguments.url, arguments.run_name)
    with ended_by_signals(), follow(run, into, once=once, on_error=_complain) as versions:
        for version in versions:
            try:
                _announce(version, into, arguments.on_version)
            except (CommandError, OSError) as error:
                if once or isinstance(error, BrokenPipeError):
                    raise
                _complain(error)


def _announce(version: FollowedVersion, into: Path, command: str) -> None:
    """Print the version and run the user's command, unless the command has succeeded for this version."""
    done = into / ".announced"  # the last version, and the command that succeeded with it
    text = f"version {version.version} (digest {version.digest})"
    if done.exists() and done.read_text() == f"{text} {command}":
        return
    print(f"{text} is in {version.path}", flush=True)
    if command and (code := run_in_shell(command, version.path, version.manifest)):
        raise CommandError(f"the command for version {version.version} ended with exit code {code}")
    done.write_text(f"{text} {command}")


def _complain(error: Exception) -> None:
    print(f"delta-weight-sync follow: {sentence(error)}", file=sys.stderr, flush=True)


def _gc(arguments: Arguments) -> None:
    """The oldest versions are deleted first. The command never deletes these:

      - files that the newest version's manifest names;
      - objects that are at most an hour older than the run's newest object;
      - files that a manifest names, if the manifest is at most an hour older than the run's newest object;
      - the version of the oldest saved trainer state, and later versions;
      - versions that have a tag, see `tag`; with a public key, or in a signed run, only of signed tags;
      - HEADs, states, tags, log, run.json and README.md.

    So you can run the command while a trainer and replicas use the run. A deleted version can no longer be
    checked out, pinned or verified.

    With Publisher(..., keep="20GB"), the trainer deletes old versions itself.
    """
    reader = opened(arguments)
    keep = Keep.parse(arguments.keep)
    reader.manifest()  # raises an error if there is no version
    survey = Pruner(reader, keep).survey()
    assert survey is not None, "the run has a version"
    if arguments.dry_run:
        for info, why in survey.delete:
            print(f"{info.size:>14,}  {printable(info.key)}  {why}")
    else:
        prune(reader.bucket, survey)
    done = "would be deleted" if arguments.dry_run else "deleted"
    stay = f"versions {survey.oldest} to {survey.newest} stay, {size_text(survey.kept)}"
    if survey.kept > keep.size:
        need = "the newest version, the last hour, saved states and tags need them"
        stay += f", which is more than {arguments.keep}: {need}"
    if survey.tagged:
        stay += f"; tags keep {', '.join(survey.tagged)}"
    print(f"{len(survey.delete)} objects {done}, {size_text(survey.freed)}; {stay}")


def _keygen(arguments: Arguments) -> None:
    """FILE holds DELTA_WEIGHT_SYNC_SIGNING_KEY and DELTA_WEIGHT_SYNC_PUBLIC_KEY, and only you can read it.
    The trainer needs the first key, readers only the second, which is printed. Before you start a trainer:

      set -a; . FILE; set +a
    """
    print(f"{PUBLIC_KEY}={make_keys(arguments.file)}")


_COMMANDS: Final = {
    run.__name__[1:]: run
    for run in (_runs, _log, _show, _verify, _checkout, _bisect, _blame, _follow, _gc, _keygen)
}
