"""Inspect, verify, export and follow runs, and predict their cost."""

import argparse
import importlib
import os
import signal
import sys
from importlib import metadata
from typing import Final

from delta_weight_sync.ending import end_after_signals
from delta_weight_sync.errors import DeltaWeightSyncError, sentence

COMMANDS = {
    "runs": "list the runs of a bucket",
    "log": "list the versions of a run, newest first",
    "show": "describe one version: tensors changed, sparsity, bytes",
    "verify": "rebuild every version, oldest first, and check each digest",
    "checkout": "write one version as an ordinary Hugging Face checkpoint",
    "bisect": "find the version that broke a metric, with a command that judges it or by its scores",
    "blame": "show which tensors changed most in one version, and how far",
    "tag": "name a version, so that it is kept and found again, or list the tags",
    "diff": "compare two versions, of one run or of two: weights changed, and how far",
    "watch": "print the log of a run, or export it to wandb, trackio or TensorBoard, and follow it",
    "wait": "wait until replicas serve a version",
    "push": "write one version to the Hub as an ordinary model repository",
    "badge": "print a badge of a run for a model card: SVG with a version, and whether it is verified",
    "evaluate": "score versions with a command, and write the scores into the run's log",
    "serve": "serve the newest version by vLLM or transformers, and follow the run",
    "follow": "keep an ordinary Hugging Face checkpoint at the newest version, for any engine",
    "gc": "delete the oldest versions of a run, until the rest fits a size or an age",
    "keygen": "make a pair of keys, to sign the versions of a run and to check the signatures",
    "plan": "predict the bytes, seconds and money that a run will take",
    "doctor": "show which features work with the installed packages, and how to make the others work",
}

_MODULES: Final = {  # of the commands that are not in `commands`
    "plan": "plan",
    "doctor": "doctor",
    "serve": "serve",
    "watch": "watch",
    "tag": "working_set",
    "diff": "working_set",
    "wait": "working_set",
    "evaluate": "working_set",
    "push": "working_set",
    "badge": "working_set",
}
_END_S: Final = 4.5  # seconds from a signal to the end, with a margin: users rely on 5 seconds
# Only `follow` has a handler for SIGTERM. The other commands end immediately.
_ENDED: Final[dict[int, int]] = {signal.SIGINT: 130, signal.SIGTERM: 0}


def main(words: list[str] | None = None) -> None:
    """Run the command `words`, by default the process's arguments. If the run, the bucket or the disk fails,
    print one sentence and exit with code 1. Without `words`, the process ends within five seconds of Ctrl-C
    or SIGTERM, whatever the store does."""
    if words is None:
        end_after_signals(_END_S, _ENDED)
        words = sys.argv[1:]
    arguments = _parser(words).parse_args(words)
    name: str = arguments.command
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, is gone: drop what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
    except (DeltaWeightSyncError, OSError) as error:
        sys.exit(f"delta-weight-sync {name}: {sentence(error)}")


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """The parser of all commands. Imports only the module of the command in `words`."""
    parser = argparse.ArgumentParser(prog="delta-weight-sync", description=__doc__)
    parser.add_argument("--version", action="version", version=metadata.version("delta-weight-sync"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps the lines of an epilog
        )
        if name in words[:1]:
            module = _MODULES.get(name, "commands")
            importlib.import_module(f"delta_weight_sync.cli.{module}").configure(command, name)
    return parser
