"""`delta-weight-sync bisect RUN --eval COMMAND [--good N] [--bad N]`: the version at which a metric broke."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Final

from delta_weight_sync.cli import shell
from delta_weight_sync.cli.shell import CommandError
from delta_weight_sync.cli.which import add_run, opened
from delta_weight_sync.errors import DeltaWeightSyncError, printable
from delta_weight_sync.heads import manifests_of
from delta_weight_sync.history import RunReader
from delta_weight_sync.kept import Built, build

_EPILOG = """\
COMMAND runs in a shell for one version after the other. {path} is a folder with the version as an ordinary
checkpoint, {version} its number, {digest} its digest; they come quoted for the shell. Its exit code decides,
as with `git bisect run`:

  0 good     1 to 124 bad     125 cannot be told: another version is taken     any other ends the search

  delta-weight-sync bisect RUN --eval 'python evaluate.py {path} --at-least 0.6'

It takes as many runs of COMMAND as the number of versions can be halved. An end that is not given is judged
first: the oldest version must be good, the newest bad. Each checkpoint is made of the last good one and the
deltas from there, where that takes fewer bytes than an anchor."""
_SKIP: Final = 125
_NOT_STARTED: Final = (126, 127)  # by the shell: no program of that name, or none that may be run


class BisectError(DeltaWeightSyncError):
    """There is no first bad version between the two ends, or it cannot be told which one it is."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    add_run(parser)
    parser.add_argument("--eval", metavar="COMMAND", required=True, help="what judges a version")
    parser.add_argument("--good", type=int, metavar="N", help="a version that is good (default: the oldest)")
    parser.add_argument("--bad", type=int, metavar="N", help="a later one that is bad (default: the newest)")
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """Halve the versions between the two ends until the first bad one is left."""
    if "{path}" not in arguments.eval and "{version}" not in arguments.eval:
        raise CommandError("--eval names neither {path} nor {version}, so it would judge the same each time")
    reader = opened(arguments)
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(reader, arguments.eval, Path(folder))
        search = Search(*_ends(reader, trials, arguments.good, arguments.bad))
        while (version := search.next()) is not None:
            search.take(version, trials.verdict(version))
    print(f"version {search.found()} is the first bad one; {trials.count} were judged")
    place = printable(f"{reader.bucket.url}#{reader.keys.run}")
    print(f"what changed there: delta-weight-sync blame {place} {search.bad}")


def _ends(reader: RunReader, trials: Trials, good: int | None, bad: int | None) -> tuple[int, int]:
    """The good and the bad end; what was not given is judged here, and what was is there."""
    newest = reader.at().version
    oldest = min(manifests_of(reader.bucket.list(reader.keys.manifests)))
    first, last = oldest if good is None else good, newest if bad is None else bad
    if first >= last:
        raise BisectError(f"nothing lies between good {first} and bad {last}: --bad must be a later version")
    for end in (first, last):
        reader.find(end)
    if bad is None and trials.verdict(last) is not False:
        raise BisectError(f"the newest version, {last}, is not bad: there is nothing to find")
    if good is None and trials.verdict(first) is not True:
        raise BisectError(f"the oldest version, {first}, is not good: what broke it was not kept")
    return first, last


class Search:
    """What is known of the versions between a good and a later bad one."""

    def __init__(self, good: int, bad: int) -> None:
        self._good, self.bad, self._skipped = good, bad, set[int]()

    def next(self) -> int | None:
        """The version to judge: the one nearest to the middle; None where none is left."""
        left = (v for v in range(self._good + 1, self.bad) if v not in self._skipped)
        return min(left, key=lambda version: abs(2 * version - self._good - self.bad), default=None)

    def take(self, version: int, good: bool | None) -> None:
        """A verdict; None: it cannot be told."""
        if good is None:
            self._skipped.add(version)
        elif good:
            self._good = version
        else:
            self.bad = version

    def found(self) -> int:
        """The first bad version; raises `BisectError` where those before it could not be judged."""
        if self._good + 1 < self.bad:
            raise BisectError(
                f"the first bad version is one of {self._good + 1} to {self.bad}: those between could not be"
                " judged (exit code 125)"
            )
        return self.bad


class Trials:
    """Versions as checkpoints, one at a time beside the last good one, and what a command says of them."""

    def __init__(self, reader: RunReader, command: str, folder: Path) -> None:
        self._reader, self._command, self._folder = reader, command, folder
        self._good: Built | None = None
        self.count = 0

    def verdict(self, version: int) -> bool | None:
        """Whether a version is good; None if the command cannot tell. Raises `CommandError`."""
        manifest = self._reader.find(version)
        built = Built(manifest, self._folder / f"{version:08d}")
        build(self._reader, manifest, built.folder, self._good)
        good = _judged(self._command, built)
        self.count += 1
        print(f"version {version}: {_WORDS[good]}", flush=True)
        self._keep(built, good=bool(good))
        return good

    def _keep(self, built: Built, *, good: bool) -> None:
        """The next ones are later than the last good version, so that its deltas lead to them."""
        superseded = self._good if good else built
        self._good = built if good else self._good
        if superseded:
            shutil.rmtree(superseded.folder)


_WORDS = {True: "good", False: "bad", None: "cannot be told"}


def _judged(command: str, built: Built) -> bool | None:
    code = shell.run(command, built.folder, built.manifest)
    if code in _NOT_STARTED:
        raise CommandError(f"--eval could not be started (exit code {code}): try it in a shell on a checkout")
    if not 0 <= code <= _SKIP:
        raise CommandError(
            f"--eval ended with {code} at version {built.manifest.version}, which is neither good (0) nor bad"
            " (1 to 124)"
        )
    return None if code == _SKIP else code == 0
