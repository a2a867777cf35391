"""`bench/results.json`: one key per section; running one section leaves the others as they are."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "bench" / "results.json"
SCRATCH = ROOT / "build" / "bench"  # what may be made again: checkpoints, updates, delta files
DOCS = ROOT / "docs"
Results = dict[str, Any]


def read() -> Results:
    """All figures so far; empty before the first run."""
    content: Results = json.loads(FILE.read_text()) if FILE.exists() else {}
    return content


def put(section: str, figures: object) -> None:
    """Replace one section."""
    merged = read() | {section: figures}
    FILE.write_text(json.dumps(merged, indent=1) + "\n")
