"""`python -m docs.run [--quick]`: run the commands of the pages, say what did not work.

`make docs-check` calls it: every command of README.md and docs/*.md is run, in order, in a copy of the
checkout. A ```bash block is a shell script (`bash -euo pipefail`) that must succeed. A comment directly
before it says otherwise; several parts are separated by ";":

    <!-- docs-check: shows -->                       it prints the ```text block after it; … is anything
    <!-- docs-check: background until http://… -->   it goes on to the end of the page; the next block waits
    <!-- docs-check: slow -->                        not in the quick run that is part of the tests
    <!-- docs-check: not run, it needs a GPU -->     listed with this reason

Each block is a shell of its own: variables do not go on to the next block; background blocks end with their
page.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from docs.stage import ROOT, TUTORIAL, Stage, staged

_FENCE = re.compile(r"\s*```(\w*)\s*$")
_COMMENT = re.compile(r"\s*<!-- docs-check: (.+?) -->\s*$")
_SHELLS = ("sh", "shell", "console", "zsh")


class PageError(ValueError):
    """A page whose commands cannot be checked; the message names the line and the fix."""


@dataclass(frozen=True)
class Block:
    """One ```bash block and what the comment before it says."""

    page: str
    line: int
    code: str
    slow: bool = False
    until: str = ""  # the URL that answers once a background block is ready
    reason: str = ""  # why it is not run
    shows: bool = False
    shown: str = ""  # what it must print; … stands for anything

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path, page: str) -> list[Block]:
    """All commands of a page, in order. Raises `PageError`."""
    found: list[Block] = []
    comment = ""
    for line, kind, text in _parts(path.read_text(), page):
        if kind == "comment":
            comment = text
        elif kind == "bash":
            found.append(_marked(Block(page, line, text), comment))
            comment = ""
        elif kind == "text" and found and found[-1].shows and not found[-1].shown:
            found[-1] = replace(found[-1], shown=text)
    if lost := [block.place for block in found if block.shows and not block.shown]:
        raise PageError(f"{lost[0]} shows nothing: put its output into a ```text block after it")
    return found


def _parts(text: str, page: str) -> Iterator[tuple[int, str, str]]:
    """(line, "comment", words) and (line, language, content of a fence)."""
    lines = list(enumerate(text.splitlines(), 1))
    while lines:
        number, line = lines.pop(0)
        if match := _COMMENT.match(line):
            yield number, "comment", match[1]
        elif match := _FENCE.match(line):
            if match[1] in _SHELLS:
                raise PageError(f"{page}:{number} is not checked: write ```bash in place of ```{match[1]}")
            content: list[str] = []
            while lines and not _FENCE.match(lines[0][1]):
                content.append(lines.pop(0)[1])
            del lines[:1]
            yield number, match[1], "\n".join(content)


def _marked(block: Block, comment: str) -> Block:
    for part in filter(None, (part.strip() for part in comment.split(";"))):
        if part in ("slow", "shows"):
            block = replace(block, **{part: True})
        elif part.startswith("background until http"):
            block = replace(block, until=part.removeprefix("background until "))
        elif part.startswith("not run, "):
            block = replace(block, reason=part.removeprefix("not run, "))
        else:
            raise PageError(f"{block.place}: docs-check does not know {part!r}; see docs/run.py")
    return block


_QUICK_S = 600.0
_SLOW_S = 3600.0
_READY_S = 600.0
_LINES = 30  # of a failed command's output
_PATIENCE_S = 30.0


@dataclass
class Report:
    passed: list[Block] = field(default_factory=list)
    failed: list[Block] = field(default_factory=list)
    left_out: list[tuple[Block, str]] = field(default_factory=list)

    def summary(self) -> str:
        lines = [f"not run: {block.place}, {reason}" for block, reason in self.left_out]
        counts = f"{len(self.passed)} blocks passed, {len(self.failed)} failed, {len(self.left_out)} not run"
        return "\n".join([*lines, *(f"FAILED: {block.place}" for block in self.failed), counts])


def pages() -> list[tuple[Path, str]]:
    return [
        (ROOT / "README.md", "README.md"),
        *((p, f"docs/{p.name}") for p in sorted((ROOT / "docs").glob("*.md"))),
    ]


def check(every: Sequence[list[Block]], stage: Stage, *, quick: bool) -> Report:
    """Run all blocks, page after page; quick ones of two pages side by side, unless both deploy."""
    report = Report()
    deploying = [page for page in every if any("trainer.deploy" in block.code for block in page)]
    lanes = [deploying, [page for page in every if page not in deploying]] if quick else [every]
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(functools.partial(_lane, stage, report, quick), lanes))
    return report


def _lane(stage: Stage, report: Report, quick: bool, lane: Sequence[list[Block]]) -> None:
    for page in lane:
        with ExitStack() as background:
            for block in page:
                _block(block, stage, background, report, quick=quick)


def _block(block: Block, stage: Stage, background: ExitStack, report: Report, *, quick: bool) -> None:
    if reason := block.reason or ("it is slow" if quick and block.slow else ""):
        report.left_out.append((block, reason))
        return
    started = time.monotonic()
    trouble = background.enter_context(_served(block, stage)) if block.until else _run(block, stage)
    (report.failed if trouble else report.passed).append(block)
    first = next((line for line in block.code.splitlines() if line and not line.startswith("#")), "")
    mark = "FAILED" if trouble else "ok"
    print(f"{mark:6} {time.monotonic() - started:6.1f} s  {block.place:32} {first[:90]}", flush=True)
    if trouble:
        print("\n".join(f"       {line}" for line in trouble.splitlines()[-_LINES:]), flush=True)


def _run(block: Block, stage: Stage) -> str:
    """What is wrong with a block that ends by itself, else nothing."""
    with tempfile.TemporaryFile("w+") as output:
        shell = _start(block, stage, output.fileno())
        try:
            code = shell.wait(_SLOW_S if block.slow else _QUICK_S)
        except subprocess.TimeoutExpired:
            code = "none in time"
        finally:
            _stop(shell)
        output.seek(0)
        printed = output.read()
    if code != 0:
        return f"{printed}\nexit code {code}"
    return f"it printed\n{printed}" if block.shows and not _same(printed, block.shown) else ""


def _same(printed: str, shown: str) -> bool:
    texts = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (printed, shown))
    found, wanted = texts
    return re.fullmatch(".*".join(map(re.escape, wanted.split("…"))), found, re.DOTALL) is not None


@contextmanager
def _served(block: Block, stage: Stage) -> Iterator[str]:
    """A background block; yields what is wrong with it, else nothing."""
    with tempfile.TemporaryFile("w+") as output:
        shell = _start(block, stage, output.fileno())
        try:
            ready = _answers(block.until, shell)
            output.seek(0)
            yield "" if ready else f"{output.read()}\n{block.until} does not answer"
        finally:
            _stop(shell)


def _answers(url: str, shell: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and shell.poll() is None:
        try:
            if httpx.get(url, timeout=5.0, trust_env=False).is_success:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    return False


def _start(block: Block, stage: Stage, output: int) -> subprocess.Popen[bytes]:
    code = block.code.replace(TUTORIAL, stage.tutorial)
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=stage.folder,
        env=stage.environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _stop(shell: subprocess.Popen[bytes]) -> None:
    """End the block's whole process group; nothing that a page started stays."""
    for sign in (signal.SIGTERM, signal.SIGKILL):  # an interrupt may be ignored, as for jobs of a shell
        try:
            os.killpg(shell.pid, sign)
        except ProcessLookupError:
            break
        try:
            shell.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            continue
    shell.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.run", description="Check the pages' commands.")
    parser.add_argument("--quick", action="store_true", help="leave the slow blocks out")
    quick = parser.parse_args().quick
    every = [blocks(path, page) for path, page in pages()]
    with tempfile.TemporaryDirectory() as temporary, staged(Path(temporary)) as stage:
        report = check(every, stage, quick=quick)
    print(report.summary())
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
