"""What several commands share: the argument RUN, versions by number or tag, and tables."""

import argparse
import json
import string
from collections.abc import Iterable
from typing import Any, Final

from delta_weight_sync.errors import printable
from delta_weight_sync.reader import RunReader, open_run
from delta_weight_sync.util import size_text

URLS: Final = "hf://buckets/<owner>/<name>, s3://<bucket>/<prefix> or file:///<path>"


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a run."""
    text = f"{URLS}; add #<run> if the bucket holds several runs"
    parser.add_argument("url", metavar="RUN", help=text)
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="name of the run, instead of #<run>")


def version_or_tag(text: str) -> int | str:
    """The number of a version, or a tag."""
    try:
        return int(text)
    except ValueError:
        return text


def opened(arguments: argparse.Namespace) -> RunReader:
    """Open the run that the arguments name."""
    return open_run(arguments.url, arguments.run_name)


def print_rows(columns: str, rows: Iterable[dict[str, Any]], as_json: bool) -> None:
    """Print each row as a line of a table, with a header, or as a line of JSON."""
    if not as_json:
        print(columns.format_map({name: name for _, name, *_ in string.Formatter().parse(columns) if name}))
    for row in rows:
        print(json.dumps(row) if as_json else columns.format_map({k: cell(k, v) for k, v in row.items()}))


def cell(name: str, value: Any) -> str:
    """The text of a value in the column `name`. A float is a share."""
    if isinstance(value, float):
        return f"{100 * value:.3f} %"
    if isinstance(value, bool):
        return "yes" if value else ""
    return size_text(value) if name in ("payload", "size") else printable(str(value))
