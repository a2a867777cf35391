"""The commands of a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

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
            raise PageError(f"{block.place}: docs-check does not know {part!r}; see tests/docs/__init__.py")
    return block
