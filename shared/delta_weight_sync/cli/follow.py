"""`delta-weight-sync follow RUN --into DIR [--on-version COMMAND]`: the newest version, for any engine."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from delta_weight_sync.cli import shell
from delta_weight_sync.cli.shell import CommandError
from delta_weight_sync.cli.which import add_run, opened
from delta_weight_sync.errors import printable
from delta_weight_sync.kept import KeptCheckpoint, kept_checkpoint
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import ProtocolError
from delta_weight_sync.store import ObjectMissing
from delta_weight_sync.watch import newest, watch

_EPILOG = """\
DIR/current is a link to the newest version's folder, such as DIR/00000041. It is replaced in one step when
that folder is whole and its digest is the published one; no folder that readers may see is written to again.
The version before stays until the next one is built. What is damaged in the bucket is named and not applied,
and an unreachable bucket is asked again; until then everything stays as it is. After a kill at any moment,
the next start goes on with what is there, if its digest is right.

COMMAND runs in a shell after each new version, and following waits for it. A version whose command failed or
was never run is offered again at the next start. {path} is the version's own folder, {version} its number,
{digest} its digest. They come quoted for the shell, so end your own quotes before them, as here for SGLang:

  --on-version "curl -f localhost:30000/update_weights_from_disk --json '{\\"model_path\\": \\"'{path}'\\"}'"

Ctrl-C ends it with exit code 130, SIGTERM with 0."""
_EXIT_CODES: Final[dict[int, int]] = {signal.SIGINT: 130, signal.SIGTERM: 0}


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    add_run(parser)
    parser.add_argument("--into", type=Path, metavar="DIR", required=True, help="folder to keep")
    parser.add_argument(
        "--on-version", metavar="COMMAND", default="", help="what to run for each new version"
    )
    parser.add_argument(
        "--once", action="store_true", help="end when the newest version is there, as for cron"
    )
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """Follow until a signal comes, or `--once`."""
    reader = opened(arguments)
    with _ended_by_signals(), kept_checkpoint(reader, arguments.into) as kept:
        follower = Follower(kept, arguments.on_version)
        if arguments.once:
            follower.take(newest(reader, kept.held))
        else:
            watch(reader, follower.take_and_go_on, _complain, kept.held)


class Follower:
    """Brings the folder to a version, and tells the engine."""

    def __init__(self, kept: KeptCheckpoint, command: str) -> None:
        self._kept, self._command = kept, command
        self._told = kept.folder / ".told"  # the last version and the command that succeeded with it

    def take(self, manifest: Manifest) -> None:
        """Raises as `KeptCheckpoint.take`, and `CommandError`."""
        path = self._kept.take(manifest)
        version = f"version {manifest.version} (digest {manifest.digest})"
        if self._told.exists() and self._told.read_text() == f"{version} {self._command}":
            return
        print(f"{version} is in {path}", flush=True)
        if self._command and (code := shell.run(self._command, path, manifest)):
            raise CommandError(f"the command for version {manifest.version} ended with exit code {code}")
        self._told.write_text(f"{version} {self._command}")

    def take_and_go_on(self, manifest: Manifest) -> None:
        """The same, but a command that fails is only reported.

        Where nothing is held yet and a file of the version is damaged, an older version is taken first.
        """
        try:
            self.take(manifest)
        except CommandError as error:
            _complain(error)
        except (ProtocolError, ObjectMissing):
            if older := self._kept.instead_of(manifest):
                self.take_and_go_on(older)
            raise


def _complain(error: Exception) -> None:
    print(f"delta-weight-sync follow: {printable(str(error))}", file=sys.stderr, flush=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block, and a command that runs, as `sys.exit` would."""

    def end(sign: int, _: object) -> None:
        sys.exit(_EXIT_CODES[sign])

    before = {sign: signal.signal(sign, end) for sign in _EXIT_CODES}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
