"""The console command in this process: what it printed, its complaint, and its exit code."""

import contextlib
import io
from dataclasses import dataclass

from delta_weight_sync.cli import main


@dataclass
class Result:
    """What a command did; `complaint` is all that it wrote to stderr, its last sentence included."""

    code: int
    output: str
    complaint: str


def command(*words: object) -> Result:
    """Run `delta-weight-sync <words>`."""
    output = io.StringIO()
    complaint = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(complaint):
        try:
            main([str(word) for word in words])
        except SystemExit as stop:  # as Python itself ends: a sentence goes to stderr
            if isinstance(stop.code, str):
                print(stop.code, file=complaint)
            code = 1 if isinstance(stop.code, str) else stop.code or 0
    return Result(code, output.getvalue(), complaint.getvalue())
