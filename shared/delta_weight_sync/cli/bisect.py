"""The command bisect: finds the version that broke a metric."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Final

from delta_weight_sync.checkout import FollowedVersion, build
from delta_weight_sync.cli.commands import add_run, opened, run_in_shell
from delta_weight_sync.errors import BisectError, CommandError, printable
from delta_weight_sync.reader import RunReader, manifests_of

_EPILOG = """\
COMMAND runs in a shell for one version after another. {path} is a folder with the version as an ordinary
checkpoint, {version} its number, {digest} its digest; they come quoted for the shell. Its exit code decides,
as with `git bisect run`:

  0 good     1 to 124 bad     125 unknown: another version is tried     any other ends the search

  delta-weight-sync bisect RUN --eval 'python evaluate.py {path} --at-least 0.6'

The number of runs of COMMAND is about log2 of the number of versions. An end that you do not give is judged
first: the oldest version must be good, the newest bad. Each checkpoint is built from the last good one and
the deltas after it, if that takes fewer bytes than an anchor."""
_SKIP: Final = 125
_NOT_STARTED: Final = (126, 127)  # the shell's codes for a program that is missing or not executable
_VERDICTS: Final = {True: "good", False: "bad", None: "unknown"}


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `bisect`."""
    add_run(parser)
    parser.add_argument("--eval", metavar="COMMAND", required=True, help="command that judges a version")
    parser.add_argument("--good", type=int, metavar="N", help="a version that is good (default: the oldest)")
    parser.add_argument("--bad", type=int, metavar="N", help="a later one that is bad (default: the newest)")
    parser.epilog = _EPILOG
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    if "{path}" not in arguments.eval and "{version}" not in arguments.eval:
        raise CommandError("--eval names neither {path} nor {version}, so it would judge the same each time")
    reader = opened(arguments)
    with tempfile.TemporaryDirectory() as folder:
        judge = _Judge(reader, arguments.eval, Path(folder))
        good, bad = _ends(reader, judge, arguments.good, arguments.bad)
        unknown = set[int]()
        while left := [version for version in range(good + 1, bad) if version not in unknown]:
            version = left[len(left) // 2]
            verdict = judge.verdict(version)
            if verdict is None:
                unknown.add(version)
            elif verdict:
                good = version
            else:
                bad = version
    if good + 1 < bad:
        raise BisectError(
            f"the first bad version is one of {good + 1} to {bad}: those between could not be judged (exit"
            " code 125)"
        )
    print(f"version {bad} is the first bad one; {judge.count} were judged")
    place = printable(f"{reader.bucket.url}#{reader.keys.run}")
    print(f"to see what changed there: delta-weight-sync blame {place} {bad}")


def _ends(reader: RunReader, judge: _Judge, good: int | None, bad: int | None) -> tuple[int, int]:
    """The good and the bad end. Ends that you gave must exist, the others are judged."""
    newest = reader.manifest().version
    oldest = min(manifests_of(reader.bucket.list(reader.keys.manifests)))
    first, last = oldest if good is None else good, newest if bad is None else bad
    if first >= last:
        raise BisectError(f"nothing lies between good {first} and bad {last}: --bad must be a later version")
    for end in (first, last):
        reader.find(end)
    if bad is None and judge.verdict(last) is not False:
        raise BisectError(f"the newest version, {last}, is not bad: there is nothing to find")
    if good is None and judge.verdict(first) is not True:
        raise BisectError(f"the oldest version, {first}, is not good: the version that broke it was deleted")
    return first, last


class _Judge:
    """Builds versions as checkpoints, next to the last good one, and runs the user's command on them."""

    def __init__(self, reader: RunReader, command: str, folder: Path) -> None:
        self._reader, self._command, self._folder = reader, command, folder
        self._good: FollowedVersion | None = None  # later versions are built from it
        self.count = 0

    def verdict(self, version: int) -> bool | None:
        """Whether a version is good, or None if the command does not know. Raises `CommandError`."""
        manifest = self._reader.find(version)
        built = FollowedVersion(manifest, self._folder / f"{version:08d}")
        build(self._reader, manifest, built.path, self._good)
        code = run_in_shell(self._command, built.path, manifest)
        if code in _NOT_STARTED:
            raise CommandError(
                f"--eval could not be started (exit code {code}): try it in a shell on a checkout"
            )
        if not 0 <= code <= _SKIP:
            raise CommandError(
                f"--eval ended with {code} at version {version}, which is neither good (0) nor bad (1 to 124)"
            )
        good = None if code == _SKIP else code == 0
        self.count += 1
        print(f"version {version}: {_VERDICTS[good]}", flush=True)
        superseded = self._good if good else built
        if good:
            self._good = built
        if superseded:
            shutil.rmtree(superseded.path)
        return good
