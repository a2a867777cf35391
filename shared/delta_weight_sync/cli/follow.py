"""The command follow: keeps a checkpoint folder at the newest version, for any engine."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from delta_weight_sync.checkout import CheckpointFolder, FollowedVersion, follow, updates
from delta_weight_sync.cli.commands import add_run, opened, run_in_shell
from delta_weight_sync.errors import CommandError, printable

_EPILOG = """\
DIR/current is a link to the newest version's folder, such as DIR/00000041. It is replaced in one step, after
that folder is complete and its digest is verified. Folders that readers can see are never written again. The
version before stays until the next one is built. Damaged objects are reported and not applied, and an
unreachable bucket is asked again; until then nothing changes. After a kill at any moment, the next start
continues with what is there if its digest is right.

COMMAND runs in a shell after each new version, and the next version waits for it. If it fails or was never
run for a version, it runs again at the next start. {path} is the version's own folder, {version} its number,
{digest} its digest. They come quoted for the shell, so end your own quotes before them, as here for SGLang:

  --on-version "curl -f localhost:30000/update_weights_from_disk --json '{\\"model_path\\": \\"'{path}'\\"}'"

Ctrl-C ends it with exit code 130, SIGTERM with 0."""
_EXIT_CODES: Final[dict[int, int]] = {signal.SIGINT: 130, signal.SIGTERM: 0}


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `follow`."""
    add_run(parser)
    parser.add_argument("--into", type=Path, metavar="DIR", required=True, help="folder to write")
    parser.add_argument(
        "--on-version", metavar="COMMAND", default="", help="command to run for each new version"
    )
    parser.add_argument(
        "--once", action="store_true", help="end when the newest version is there, as for cron"
    )
    parser.epilog = _EPILOG
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    reader, into = opened(arguments), arguments.into
    with _ended_by_signals():
        if arguments.once:
            with follow(reader, into, once=True) as versions:
                for version in versions:
                    _announce(version, into, arguments.on_version)
            return
        with CheckpointFolder(reader, into) as folder:
            for version in updates(reader, folder, _complain):
                try:
                    _announce(version, into, arguments.on_version)
                except BrokenPipeError:
                    raise
                except (CommandError, OSError) as error:
                    _complain(error)


def _announce(version: FollowedVersion, into: Path, command: str) -> None:
    """Print the version and run the user's command, unless that succeeded before."""
    done = into / ".announced"  # the last version, and the command that succeeded with it
    text = f"version {version.version} (digest {version.digest})"
    if done.exists() and done.read_text() == f"{text} {command}":
        return
    print(f"{text} is in {version.path}", flush=True)
    if command and (code := run_in_shell(command, version.path, version.manifest)):
        raise CommandError(f"the command for version {version.version} ended with exit code {code}")
    done.write_text(f"{text} {command}")


def _complain(error: Exception) -> None:
    print(f"delta-weight-sync follow: {printable(str(error))}", file=sys.stderr, flush=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block, and a running command, as `sys.exit` does."""

    def end(sign: int, _: object) -> None:
        sys.exit(_EXIT_CODES[sign])

    before = {sign: signal.signal(sign, end) for sign in _EXIT_CODES}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
