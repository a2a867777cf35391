"""Look at a run, prove it, take its weights out of the bucket, and reckon what a run will cost."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Protocol, cast

from delta_weight_sync.errors import DeltaWeightSyncError, printable

COMMANDS = {
    "log": "list the versions of a run, newest first",
    "show": "describe one version: tensors changed, sparsity, bytes",
    "verify": "rebuild every version from version 0 and check each digest",
    "checkout": "write one version as an ordinary Hugging Face checkpoint",
    "bisect": "find the version at which a metric broke, by a command that judges a checkpoint",
    "blame": "show which tensors changed most at one version, and how far",
    "corpus": "measure how the weights of runs changed, as rows of a small data set",
    "follow": "keep an ordinary Hugging Face checkpoint at the newest version, for any engine",
    "gc": "delete the oldest versions of a run, within a budget of bytes or age",
    "keygen": "make the pair of keys with which a run's versions are signed and checked",
    "plan": "predict bytes, seconds and money of a run, before there is one",
}


class Command(Protocol):
    """What each module of this package offers; only the one that is asked for is imported."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the words that the command takes."""

    def run(self, arguments: argparse.Namespace) -> None:
        """Do it. `DeltaWeightSyncError` and `OSError` become one sentence and exit code 1."""


def main(words: list[str] | None = None) -> None:
    """Run one command; a fault of the run, the bucket or the disk is one sentence and exit code 1."""
    words = sys.argv[1:] if words is None else words
    arguments = _parser(words).parse_args(words)
    name: str = arguments.command
    try:
        _command(name).run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:  # the only part whose libraries are an extra
        sys.exit(f"delta-weight-sync {name}: {error}; s3:// needs `pip install 'delta-weight-sync[s3]'`")
    except (DeltaWeightSyncError, OSError) as error:
        sys.exit(f"delta-weight-sync {name}: {printable(str(error))}")


def _parser(words: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="delta-weight-sync", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", formatter_class=_AsWritten
        )
        if name in words[:1]:
            _command(name).configure(command)
    return parser


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """A command's epilog keeps its lines."""


def _command(name: str) -> Command:
    return cast(Command, importlib.import_module(f"delta_weight_sync.cli.{name}"))
