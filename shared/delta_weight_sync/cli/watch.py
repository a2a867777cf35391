"""The command watch: prints the log of a run, or exports it, and follows it."""

import argparse
import inspect
import signal
import sys
import threading
from pathlib import Path

from delta_weight_sync.cli.parts import add_run, opened
from delta_weight_sync.errors import ConfigError, printable
from delta_weight_sync.exporters import TARGETS, Lines, export, open_target

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 0}


def configure(parser: argparse.ArgumentParser, _: str) -> None:
    """Add the arguments of `watch`. The docstring of its function ends the help."""
    parser.epilog = inspect.getdoc(_watch)
    parser.set_defaults(run=_watch)
    add_run(parser)
    add = parser.add_argument
    add("--to", choices=list(TARGETS), help="export the values (default: print them)")
    text = "project of wandb or trackio (default: delta-weight-sync)"
    add("--project", metavar="NAME", default="delta-weight-sync", help=text)
    text = "folder of the export: event files for TensorBoard, and what was exported (default: runs/<run>)"
    add("--into", type=Path, metavar="DIR", help=text)
    add("--once", action="store_true", help="exit when the log of now is printed or exported")


def _watch(arguments: argparse.Namespace) -> None:
    """For each step, the metrics: reward, loss, kl, your own. For each version, its bytes, its scores, and
    which replica committed it when. The command reads the run's log in the bucket, so it runs anywhere, and
    whatever happens to it, the run goes on.

      delta-weight-sync watch RUN --to wandb --project wordle
      delta-weight-sync watch RUN --to tensorboard && tensorboard --logdir runs

    Each value is exported once, also if the command starts again with the same DIR. If the target or the
    bucket does not answer, the command says so and tries again; with --once, it exits with code 1. A trainer
    that goes back repeats steps; those keep their first values. Ctrl-C ends the command.
    """
    if arguments.into and not arguments.to:
        raise ConfigError("--into is the folder of an export: add --to")
    reader = opened(arguments)
    folder = arguments.into or Path("runs") / reader.keys.run
    stopped = threading.Event()
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        stopped.set()

    # The signals end the command between two events, so that what is noted as exported is what was exported.
    before = {sign: signal.signal(sign, stop) for sign in _CODES}
    try:
        export(
            reader,
            lambda: open_target(arguments.to, reader, folder, arguments.project) if arguments.to else Lines(),
            once=arguments.once,
            stopped=stopped,
            say=_say,
        )
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
    if received:
        sys.exit(_CODES[signal.Signals(received[0])])


def _say(sentence: str) -> None:
    print(f"delta-weight-sync watch: {printable(sentence)}", file=sys.stderr, flush=True)
