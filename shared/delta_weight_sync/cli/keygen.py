"""`delta-weight-sync keygen FILE`."""

from __future__ import annotations

import argparse
from pathlib import Path

from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, make_keys

_EPILOG = f"""\
FILE holds {SIGNING_KEY} and {PUBLIC_KEY}, and only you can read it. The trainer
needs both, replicas and other readers the second alone:

  set -a; . FILE; set +a"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="where to write them; must not exist")
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """Write the pair, and say the half that may be said."""
    print(f"{PUBLIC_KEY}={make_keys(arguments.file)}")
