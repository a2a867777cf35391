"""Which architectures a replica can follow: fills the tables of docs/compatibility.md.

    python -m bench.compatibility                 all of them, into the page
    python -m bench.compatibility qwen3 mamba     some of them, printed only

Each is examined in a process of its own (see `bench.followed`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import textwrap
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING

from bench import tables
from bench.published import EXACT, WAYS
from bench.reloaded import Found
from bench.results import ROOT
from tests.support.tiny import ARCHITECTURES

if TYPE_CHECKING:  # a program that only prints the tables does not import vLLM
    from bench.followed import Report

PAGE = ROOT / "docs" / "compatibility.md"
_LIMIT_S = 300.0
_LEAVE_S = 10.0
_LONG = 160  # characters of a message that a cell shows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compatibility", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; without any: all")
    names = parser.parse_args().names
    if unknown := set(names) - ARCHITECTURES.keys():
        known = ", ".join(ARCHITECTURES)
        raise SystemExit(f"no architecture {', '.join(sorted(unknown))}; there are {known}")
    reports = examined(names or [*ARCHITECTURES])
    found = {"compatibility": follow_table(reports), "reload": reload_summary(reports)}
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
    """Which architectures a replica follows exactly: those without a note in a list, others in a table."""
    plain: list[str] = []
    rows: list[list[str]] = []
    exact = 0
    for name, report in reports.items():
        kind = ARCHITECTURES[name].kind
        if isinstance(report, str):
            rows.append([name, kind, _short(f"NOT EXAMINED: {report}"), ""])
            continue
        by_verdict: dict[str, list[str]] = {}
        for way, verdict in zip(WAYS, report.verdicts, strict=True):
            by_verdict.setdefault(_short(verdict), []).append(way.column)
        exact += by_verdict.keys() == {EXACT}
        if by_verdict.keys() == {EXACT} and not report.note:
            plain.append(f"{report.kind} ({kind})")
            continue
        verdicts = "; ".join(
            verdict if len(ways) == len(WAYS) else f"{', '.join(ways)}: {verdict}"
            for verdict, ways in by_verdict.items()
        )
        rows.append([report.kind, kind, verdicts, report.note])
    summary = f"All {len(WAYS)} ways are exact for {exact} of {len(reports)} architectures."
    table = tables.table(["architecture", "what is particular", "in all ways", "notes"], rows)
    listed = textwrap.fill("; ".join(plain) + ".", 120)
    return f"{summary} Without any note:\n\n{listed}\n\nThe others:\n\n{table}"


def reload_summary(reports: dict[str, Report | str]) -> str:
    """How many models equal a fresh load, after a replica's patch and after vLLM's own functions."""
    whole = [report for report in reports.values() if not isinstance(report, str)]
    columns: dict[str, list[Found | str | None]] = {
        "patched by a replica": [report.patched for report in whole],
        "`reload_weights`": [report.stock[0] if report.stock else None for report in whole],
        "`load_weights`": [report.stock[1] if report.stock else None for report in whole],
    }
    for place, function in enumerate(("`reload_weights`", "`load_weights`")):
        unpacked = [report.unpacked[place] if report.stock else None for report in whole]
        columns[f"{function}, nothing packed"] = unpacked
    lines = [f"- {what}: {_summary(cells)}" for what, cells in columns.items()]
    return "\n".join([f"Of {len(whole)} architectures:", "", *lines])


def _summary(cells: Sequence[Found | str | None]) -> str:
    counts = {
        "equal a fresh load": sum(not isinstance(cell, str | None) and not cell.tensors for cell in cells),
        "differ": sum(not isinstance(cell, str | None) and bool(cell.tensors) for cell in cells),
        "raise an error": sum(isinstance(cell, str) for cell in cells),
        "refused": sum(cell is None for cell in cells),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _short(message: str) -> str:
    """The first line of a message, and not too much of it."""
    line = message.splitlines()[0].replace("|", "/")
    return line if len(line) <= _LONG else f"{line[:_LONG].rstrip()} …"


if __name__ == "__main__":
    main()
