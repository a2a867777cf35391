"""Which architectures a replica can follow: fills the table of docs/compatibility.md.

    python -m bench.compatibility                 all of them, into the page
    python -m bench.compatibility qwen3 mamba     some of them, printed only

Each is examined in a process of its own (see `bench.followed`).
"""

import argparse
import multiprocessing
import re
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from bench import tables
from bench.results import ROOT
from bench.tiny import ARCHITECTURES

PAGE = ROOT / "docs" / "compatibility.md"
_LIMIT_S, _LEAVE_S = 300.0, 10.0
_PLACE = re.compile(r"(<!-- compatibility -->\n).*?(<!-- /compatibility -->)", re.DOTALL)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compatibility", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; without any: all")
    names = parser.parse_args().names
    rows = table(names)
    print(rows)
    if not names:
        PAGE.write_text(_PLACE.sub(lambda place: f"{place[1]}{rows}\n{place[2]}", PAGE.read_text()))


def table(names: list[str]) -> str:
    """A row for each of `names`, or for all architectures."""
    if unknown := set(names) - ARCHITECTURES.keys():
        there_are = ", ".join(ARCHITECTURES)
        raise SystemExit(f"no architecture {', '.join(sorted(unknown))}; there are {there_are}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.followed"])  # vLLM is imported once
    rows = []
    for name in names or ARCHITECTURES:
        kind, said = _examine(context, name)
        rows.append([kind, ARCHITECTURES[name].kind, said])
        print(f"{name}: {said}", flush=True)
    return tables.table(["architecture", "what is particular", "followed"], rows)


def _examine(context: multiprocessing.context.BaseContext, name: str) -> tuple[str, str]:
    """vLLM's name of an architecture and the verdict, which may be that there is none."""
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(name, there))
    process.start()
    there.close()
    try:
        late = name, "NOT EXAMINED: it took too long"
        found: tuple[str, str] = here.recv() if here.poll(_LIMIT_S) else late
    except EOFError:
        found = name, f"NOT EXAMINED: its process ended with {_end(process)}"
    process.join(_LEAVE_S)
    process.kill()
    return found


def _end(process: multiprocessing.process.BaseProcess) -> int | None:
    process.join()
    return process.exitcode


def _answer(name: str, pipe: Connection) -> None:
    from bench.followed import verdict  # the server that this process was forked from has imported it

    with tempfile.TemporaryDirectory() as folder:
        try:
            pipe.send(verdict(name, Path(folder)))
        except Exception as error:  # noqa: BLE001 - one that cannot be examined must not end the others
            pipe.send((name, f"NOT EXAMINED: {type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
