"""Refuses the worst habits of wording: `python3 tests/words.py [paths]`; by default what `make lint` checks.

In Python it reads comments and strings, that is docstrings and messages; in Markdown, text outside of code.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

CHECKED = ["*.md", "docs", "shared", "trainer", "inference_space", "env_space", ":!upstream"]
_START = r"(?:^|(?<=[.;] ))"  # of a sentence
HABITS = {
    r"\banew\b": "again",
    r"\bbeside\b": "next to, in addition to",
    r"\bso many\b": "the number: N, this many",
    r"\bnobody\b": "no one, nothing; or say who does not",
    r"\bwhoever\b": "anyone who, a client that",
    r"\btold\b": "notified, informed; or say what is sent",
    r"\bat once\b": "immediately, or at the same time",
    r"\bas many again\b": "the same number (it means twice as many)",
    _START + r"Who (?:\w+s|may|can)\b(?![^.]*\?)": "the subject: a client that ...",
    _START + r"What (?:fails|comes|goes|stays|needs|reads|lies|differs)\b(?![^.]*\?)": "the subject",
    r"\bno more(?=[.,;:)]|$)": "no longer",
}
_PATTERN = re.compile("|".join(f"({habit})" for habit in HABITS))
_CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|(?<=\n)#+ [^\n]*", re.DOTALL)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of what people read in a file."""
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                lines = re.sub(r"``?[^`\n]*``?", "", token.string).splitlines()
                yield from ((token.start[0] + n, line.strip("#\"' rbf")) for n, line in enumerate(lines))
    else:
        blank = _CODE.sub(lambda code: "\n" * code[0].count("\n"), path.read_text())
        yield from ((n, line.strip(" |*->")) for n, line in enumerate(blank.splitlines(), 1))


def main(paths: list[str]) -> int:
    """Print each habit with its place and a better word; return how many there are."""
    listed = subprocess.run(["git", "ls-files", "--", *paths], stdout=subprocess.PIPE, text=True, check=True)
    found: Counter[str] = Counter()
    for name in listed.stdout.splitlines():
        if name.endswith((".py", ".md")) and Path(name).is_file() and name != "tests/words.py":
            for number, line in texts(Path(name)):
                for match in _PATTERN.finditer(line):
                    better = [*HABITS.values()][(match.lastindex or 1) - 1]
                    print(f"{name}:{number}: {match[0]!r}: write {better}: {line[:100]}")
                    found["/".join(Path(name).parts[:2])] += 1
    print(*(f"{n:5} {area}" for area, n in found.most_common()), f"{found.total():5} in all", sep="\n")
    return found.total()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or CHECKED) > 0)
