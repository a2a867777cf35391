"""The commands tag, diff and wait: versions by name, side by side, and at the replicas."""

import argparse
import inspect
import json
import math
import re
from typing import Any, Final

from delta_weight_sync.cli.parts import URLS, add_run, opened, print_rows, version_or_tag
from delta_weight_sync.differences import differences
from delta_weight_sync.errors import ConfigError, printable
from delta_weight_sync.reader import Problems, RunReader, open_run
from delta_weight_sync.records import Manifest
from delta_weight_sync.run import Run
from delta_weight_sync.tags import remove_tag, set_tag, tags_of

_LISTED: Final = 20  # max tensors that `diff` lists, except with --json


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the arguments and the function of the command `name`. The function's docstring ends the help."""
    run = _COMMANDS[name]
    parser.epilog = inspect.getdoc(run)
    parser.set_defaults(run=run)
    add = parser.add_argument
    if name == "diff":
        text = f"a run and a version of it, a number or a tag (default: the newest). The run: {URLS}"
        add("before", metavar="RUN@VERSION", help=text)
        add("after", metavar="RUN@VERSION", help="another version, of this run or of another one")
        add("--json", action="store_true", help="print JSON")
        return
    add_run(parser)
    if name == "tag":
        add("version", nargs="?", type=version_or_tag, metavar="VERSION", help="number or tag of the version")
        add("name", nargs="?", metavar="NAME", help="the tag: letters, digits, '.', '_', '-', first a letter")
        add("--remove", metavar="NAME", help="remove a tag")
        add("--json", action="store_true", help="print JSON")
    else:
        text = "number or tag of the version (default: the newest)"
        add("--version", type=version_or_tag, metavar="VERSION", help=text)
        add("--replicas", nargs="+", required=True, metavar="URL", help="the replicas")
        add("--timeout", type=_seconds, metavar="S", help="seconds to wait at most (default: for ever)")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError
    return seconds


def _tag(arguments: argparse.Namespace) -> None:
    """Without VERSION and NAME, list the tags. A tag is accepted wherever a version is, and `gc` and trainers
    with --keep keep its version. If another version has this tag, it loses the tag. In a signed run, tags are
    signed, too: set DELTA_WEIGHT_SYNC_SIGNING_KEY.

      delta-weight-sync tag RUN 41 best
      delta-weight-sync checkout RUN --version best --out best
    """
    reader = opened(arguments)
    if arguments.remove is not None:
        if arguments.version is not None:
            raise ConfigError("--remove takes only the name of a tag: leave VERSION and NAME out")
        remove_tag(reader, arguments.remove)
        print(f"tag {arguments.remove} is removed")
        return
    if arguments.version is None:
        _list_tags(reader, arguments.json)
        return
    if arguments.name is None:
        raise ConfigError(f"name the tag after the version: tag RUN {arguments.version} NAME")
    tag = set_tag(reader, arguments.version, arguments.name)
    signed = "" if tag.signature else ", not signed"
    print(f"version {tag.version} (digest {tag.digest}) has the tag {tag.name}{signed}")


def _list_tags(reader: RunReader, as_json: bool) -> None:
    problems: Problems = {}
    tags = tags_of(reader, reader.manifest(), problems)
    rows = ({"version": tag.version, "digest": tag.digest, "tag": tag.name} for tag in tags)
    print_rows("{version:>7}  {digest:16}  {tag}", rows, as_json)
    for error in problems.values():
        if not as_json:
            print(f"not used: {error}")


def _diff(arguments: argparse.Namespace) -> None:
    """For each tensor: how many weights differ, their share, and the largest change of a value.

    delta-weight-sync diff RUN@5 RUN@9
    delta-weight-sync diff RUN@best OTHER@best
    """
    rows: list[dict[str, Any]] = []
    changed = total = tensors = 0
    largest: float | None = None
    for tensor in differences(_version_of(arguments.before), _version_of(arguments.after)):
        numel = math.prod(tensor.shape)
        total += numel
        tensors += 1
        if not (count := tensor.positions.size):
            continue
        changed += count
        moved = tensor.largest_change
        moved = None if moved is None or not math.isfinite(moved) else moved
        largest = max(largest or 0.0, moved) if moved is not None else largest
        row = {"changed": int(count), "share": count / numel, "largest": moved}
        rows.append(row | {"tensor": f"{tensor.name} {list(tensor.shape)}"})
    rows.sort(key=lambda row: (row["share"], row["changed"]), reverse=True)
    facts = {"changed": int(changed), "total": total, "tensors": tensors, "largest": largest}
    if arguments.json:
        print(json.dumps(facts | {"rows": rows}))
        return
    share = 100 * changed / total if total else 0.0
    print(f"{changed:,} weights of {total:,} differ, {share:.3f} %, in {len(rows)} of {tensors} tensors")
    if rows:
        print(f"largest change of a weight: {_number(largest)}")
        shown = [row | {"largest": _number(row["largest"])} for row in rows[:_LISTED]]
        print_rows("{changed:>10}  {share:>9}  {largest:>9}  {tensor}", shown, as_json=False)
    if len(rows) > _LISTED:
        print(f"{len(rows) - _LISTED} more tensors differ, by equal or smaller shares")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _version_of(text: str) -> tuple[RunReader, Manifest]:
    """The run and the version that RUN@VERSION names."""
    match = re.fullmatch(r"(.+)@([^@/#]+)", text)
    url, version = match.groups() if match else (text, "")
    reader = open_run(url)
    return reader, reader.manifest(version_or_tag(version) if version else None)


def _wait(arguments: argparse.Namespace) -> None:
    """Return when each replica serves the version or a newer one, with the published digest. The URL is
    that of a public Space of this project, or of a vLLM server with the plugin. The version need not be
    published yet.

      delta-weight-sync wait RUN --version 41 --replicas http://localhost:8000 --timeout 60
    """
    run = Run(arguments.url, arguments.run_name)
    served = run.wait(arguments.version, arguments.replicas, timeout_s=arguments.timeout)
    for url, version in served.items():
        print(f"{printable(url)} serves version {version}")


_COMMANDS: Final = {run.__name__[1:]: run for run in (_tag, _diff, _wait)}
