"""Which architectures a replica can follow: fills the tables of docs/compatibility.md.

    python -m bench.compatibility                 all of them, into the page
    python -m bench.compatibility qwen3 mamba     some of them, printed only

Each is examined in a process of its own (see `bench.followed`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING

from bench import tables
from bench.published import EXACT, WAYS
from bench.reloaded import COMPUTED, Found
from bench.results import ROOT
from tests.support.tiny import ARCHITECTURES

if TYPE_CHECKING:  # a program that only prints the tables does not import vLLM
    from bench.followed import Report

PAGE = ROOT / "docs" / "compatibility.md"
_LIMIT_S = 300.0
_LEAVE_S = 10.0
_LONG = 160  # characters of a message that a cell shows
_RELOADS = ("`reload_weights`", "`reload_weights`, nothing packed", "`load_weights`, nothing packed")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compatibility", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; without any: all")
    names = parser.parse_args().names
    if unknown := set(names) - ARCHITECTURES.keys():
        known = ", ".join(ARCHITECTURES)
        raise SystemExit(f"no architecture {', '.join(sorted(unknown))}; there are {known}")
    reports = examined(names or [*ARCHITECTURES])
    found = {"compatibility": follow_table(reports), "reload": reload_table(reports)}
    print(*found.values(), sep="\n\n")
    if not names:
        PAGE.write_text(_filled(PAGE.read_text(), found))


def _filled(page: str, found: dict[str, str]) -> str:
    for place, text in found.items():
        before, start, rest = page.partition(f"<!-- {place} -->\n")
        _, end, after = rest.partition(f"<!-- /{place} -->")
        page = f"{before}{start}{text}\n{end}{after}"
    return page


def examined(names: Sequence[str]) -> dict[str, Report | str]:
    """What was found out about each architecture, or why it could not be examined."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.followed"])  # vLLM is imported once
    reports: dict[str, Report | str] = {}
    for name in names:
        reports[name] = _examined(context, name)
        print(f"{name}: {_brief(reports[name])}", flush=True)
    return reports


def _brief(report: Report | str) -> str:
    return report if isinstance(report, str) else "; ".join(dict.fromkeys(report.verdicts))


def _examined(context: ForkServerContext, name: str) -> Report | str:
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(name, writing))
    process.start()
    writing.close()
    try:
        found: Report | str = "it took too long"
        if reading.poll(_LIMIT_S):
            found = reading.recv()
    except EOFError:
        process.join()
        found = f"its process ended with {process.exitcode}"
    process.join(_LEAVE_S)
    process.kill()
    return found


def _answer(name: str, pipe: Connection) -> None:
    from bench.followed import examine  # the server that this process was forked from has imported it

    with tempfile.TemporaryDirectory() as folder:
        try:
            pipe.send(examine(name, Path(folder)))
        except Exception as error:  # noqa: BLE001 - one that cannot be examined must not end the others
            pipe.send(f"{type(error).__name__}: {error}")


def follow_table(reports: dict[str, Report | str]) -> str:
    """Which architectures a replica follows exactly, for each way to publish them."""
    rows = []
    for name, report in reports.items():
        kind = ARCHITECTURES[name].kind
        if isinstance(report, str):
            rows.append([name, kind, _short(f"NOT EXAMINED: {report}"), *[""] * len(WAYS)])
            continue
        cells: list[str] = []
        for verdict in report.verdicts:
            # A long message stands in a row once.
            known = verdict != EXACT and _short(verdict) in cells
            cells.append("as on the left" if known else _short(verdict))
        rows.append([report.kind, kind, *cells, report.note])
    exact = sum(not isinstance(report, str) and {*report.verdicts} == {EXACT} for report in reports.values())
    head = ["architecture", "what is particular", *(way.column for way in WAYS), "notes"]
    summary = f"All {len(WAYS)} ways are exact for {exact} of {len(rows)} architectures."
    return f"{summary}\n\n{tables.table(head, rows)}"


def reload_table(reports: dict[str, Report | str]) -> str:
    """How models differ from a fresh load, after a replica's patch and after vLLM's own functions."""
    whole = [report for report in reports.values() if not isinstance(report, str)]
    rows = [[report.kind, report.patched, *_reloads(report)] for report in whole]
    head = ["architecture", "patched by a replica", *_RELOADS]
    lines = [
        f"- {what}: {_summary([row[column] for row in rows])}" for column, what in enumerate(head) if column
    ]
    dropped = [report.stock[1] for report in whole if report.stock]
    lines.append(f"- `load_weights`: {_summary(dropped)}. The table omits this column")
    cells = [[str(row[0]), *(_cell(found) for found in row[1:])] for row in rows]
    return "\n".join([f"Of {len(rows)} architectures:", "", *lines, "", tables.table(head, cells)])


def _reloads(report: Report) -> list[Found | None]:
    if not report.stock:
        return [None] * len(_RELOADS)
    return [report.stock[0], *report.unpacked]


def _summary(cells: Sequence[Found | str | None]) -> str:
    counts = {
        "equal a fresh load": sum(not isinstance(cell, str | None) and not cell.tensors for cell in cells),
        "differ": sum(not isinstance(cell, str | None) and bool(cell.tensors) for cell in cells),
        "raise an error": sum(isinstance(cell, str) for cell in cells),
        "refused": sum(cell is None for cell in cells),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _cell(found: Found | str | None) -> str:
    if found is None:
        return "refused"
    if isinstance(found, str):
        return _short(found)
    if not found.tensors:
        return "equal"
    first = ".".join(found.first.split(".")[-2:])
    if computed := first.endswith(COMPUTED):
        first = first.removesuffix(COMPUTED)
    name = f"what `{first}` computes" if computed else f"`{first}`"
    several = f"{found.tensors} tensors" if found.tensors > 1 else "1 tensor"
    return f"{several}, {found.elements:,} elements differ: {name}" + (", …" if found.tensors > 1 else "")


def _short(message: str) -> str:
    """The first line of a message, and not too much of it."""
    line = message.splitlines()[0].replace("|", "/")
    return line if len(line) <= _LONG else f"{line[:_LONG].rstrip()} …"


if __name__ == "__main__":
    main()
