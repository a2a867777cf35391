"""Fills the marked places of the pages from results.json, so that no figure in them is typed by hand.

    python -m bench.readme

A place is `<!-- bench:NAME -->` up to `<!-- /bench -->`; NAME is one of `TABLES` in `bench.tables`.
"""

import re
from collections.abc import Callable, Mapping

from bench.results import ROOT, Results, read
from bench.tables import TABLES

_PLACE = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
PAGES = ("README.md", "docs/benchmarks.md")
Table = Callable[[Results], str]


def fill(text: str, results: Results, tables: Mapping[str, Table] = TABLES) -> str:
    """The text with every marked place written anew. Raises `ValueError` for a name that no table has."""

    def written(place: re.Match[str]) -> str:
        begin, name, end = place.groups()
        if name not in tables:
            raise ValueError(f"no table {name!r} for this place; there are {', '.join(tables)}")
        return f"{begin}{tables[name](results)}\n{end}"

    return _PLACE.sub(written, text)


def main() -> None:
    """Command line."""
    for path in (ROOT / page for page in PAGES):
        path.write_text(fill(path.read_text(), read()))


if __name__ == "__main__":
    main()
