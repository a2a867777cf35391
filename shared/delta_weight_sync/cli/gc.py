"""`delta-weight-sync gc RUN --keep 20GB [--dry-run]`."""

from __future__ import annotations

import argparse

from delta_weight_sync.cli.which import add_run, opened
from delta_weight_sync.errors import printable
from delta_weight_sync.heads import NoVersionError
from delta_weight_sync.pruning import Keep, Pruner, Survey, prune
from delta_weight_sync.units import size_text

_EPILOG = """\
The oldest versions go first. What stays in any case: all that the newest version's manifest names, what the
versions of the last hour before it need, and objects younger than that. So it is safe beside a trainer and
replicas. A version that was deleted can not be checked out, pinned or verified any more.

A trainer deletes by itself where it is told what to keep: Publisher(..., keep="20GB")."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    add_run(parser)
    parser.add_argument(
        "--keep", metavar="SIZE|AGE", required=True, help="of the newest versions: 20GB, 500MB, 7d or 12h"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted, and why")
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """Delete, or only say what."""
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
    print(_summary(survey, keep, "would be deleted" if arguments.dry_run else "deleted"))


def _summary(survey: Survey, keep: Keep, done: str) -> str:
    went = f"{len(survey.delete)} objects {done}, {size_text(survey.freed)}"
    stays = f"versions {survey.oldest} to {survey.newest} stay, {size_text(survey.kept)}"
    if survey.kept > keep.size:
        stays += f", which is more than {keep}: the newest version and the last hour need it"
    return f"{went}; {stays}"
