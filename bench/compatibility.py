"""Which architectures a replica can follow: fills the marked places of docs/compatibility.md.

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
from bench.reloaded import Found
from bench.results import ROOT
from tests.support.tiny import ARCHITECTURES

if TYPE_CHECKING:  # a program that only prints the tables does not import vLLM
    from bench.followed import Report

PAGE = ROOT / "docs" / "compatibility.md"
_LIMIT_S = 300.0
_LEAVE_S = 10.0
_LONG = 160  # characters of a message that a cell shows
_FEW = 3  # architectures that a list names
_RELOADS = ("`reload_weights`", "`reload_weights`, nothing packed", "`load_weights`, nothing packed")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compatibility", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; without any: all")
    names = parser.parse_args().names
    if unknown := set(names) - ARCHITECTURES.keys():
        known = ", ".join(ARCHITECTURES)
        raise SystemExit(f"no architecture {', '.join(sorted(unknown))}; there are {known}")
    reports = examine_all(names or [*ARCHITECTURES])
    found = {"compatibility": follow_table(reports), "reload": reload_list(reports)}
    print(*found.values(), sep="\n\n")
    if not names:
        PAGE.write_text(_filled(PAGE.read_text(), found))


def _filled(page: str, found: dict[str, str]) -> str:
    for place, text in found.items():
        before, start, rest = page.partition(f"<!-- {place} -->\n")
        _, end, after = rest.partition(f"<!-- /{place} -->")
        page = f"{before}{start}{text}\n{end}{after}"
    return page


def examine_all(names: Sequence[str]) -> dict[str, Report | str]:
    """What was found out about each architecture, or why it could not be examined."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.followed"])  # vLLM is imported once
    reports: dict[str, Report | str] = {}
    for name in names:
        reports[name] = _examine_in_a_process(context, name)
        print(f"{name}: {_brief(reports[name])}", flush=True)
    return reports


def _brief(report: Report | str) -> str:
    return report if isinstance(report, str) else "; ".join(dict.fromkeys(report.verdicts))


def _examine_in_a_process(context: ForkServerContext, name: str) -> Report | str:
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_send_report, args=(name, writing))
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


def _send_report(name: str, pipe: Connection) -> None:
    from bench.followed import examine  # the server that this process was forked from has imported it

    with tempfile.TemporaryDirectory() as folder:
        try:
            pipe.send(examine(name, Path(folder)))
        except Exception as error:  # noqa: BLE001 - one that cannot be examined must not end the others
            pipe.send(f"{type(error).__name__}: {error}")


def follow_table(reports: dict[str, Report | str]) -> str:
    """Which architectures a replica follows exactly; a row for each of which there is more to say."""
    plain: list[str] = []
    rows = []
    exact = 0
    for name, report in reports.items():
        if isinstance(report, str):
            rows.append([name, _short(f"NOT EXAMINED: {report}"), ""])
            continue
        verdict = _verdict(report)
        exact += verdict == EXACT
        if verdict == EXACT and not report.note:
            plain.append(report.kind)
        else:
            rows.append([report.kind, verdict, report.note])
    summary = f"All {len(WAYS)} ways are exact for {exact} of {len(reports)} architectures."
    names = f"Exact, with nothing to note: {', '.join(plain)}."
    head = ["architecture", "result", "notes"]
    return f"{summary}\n\n{names}\n\n{tables.table(head, rows)}"


def _verdict(report: Report) -> str:
    """What all ways to publish give, or what each of them gives."""
    if len({*report.verdicts}) == 1:
        return _short(report.verdicts[0])
    pairs = zip(WAYS, report.verdicts, strict=True)
    return "; ".join(f"{way.column}: {_short(verdict)}" for way, verdict in pairs)


def reload_list(reports: dict[str, Report | str]) -> str:
    """How models differ from a fresh load, after a replica's patch and after vLLM's own functions."""
    examined = [report for report in reports.values() if not isinstance(report, str)]
    kinds = [report.kind for report in examined]
    results: dict[str, list[Found | None]] = {
        "patched by a replica": [report.patched for report in examined],
        **{name: [_reloads(report)[n] for report in examined] for n, name in enumerate(_RELOADS)},
    }
    lines = [f"- {what}: {_summary(kinds, cells)}" for what, cells in results.items()]
    return "\n".join([f"Of {len(kinds)} architectures:", "", *lines])


def _reloads(report: Report) -> list[Found | None]:
    if not report.stock:
        return [None] * len(_RELOADS)
    return [report.stock[0], *report.unpacked]


def _summary(kinds: Sequence[str], cells: Sequence[Found | None]) -> str:
    """How often each outcome occurs, with the architectures if they are few."""
    groups: dict[str, list[str]] = {
        "equal a fresh load": [],
        "differ": [],
        "raise an error": [],
        "are refused": [],
    }
    for kind, cell in zip(kinds, cells, strict=True):
        groups[_outcome(cell)].append(kind)
    return ", ".join(
        f"{len(named)} {what}" + (f" ({', '.join(named)})" if len(named) <= _FEW else "")
        for what, named in groups.items()
        if named
    )


def _outcome(cell: Found | None) -> str:
    if cell is None:
        return "are refused"
    if isinstance(cell, str):
        return "raise an error"
    return "differ" if cell.tensors else "equal a fresh load"


def _short(message: str) -> str:
    """The first line of a message, and not too much of it."""
    line = message.splitlines()[0].replace("|", "/")
    return line if len(line) <= _LONG else f"{line[:_LONG].rstrip()} …"


if __name__ == "__main__":
    main()
