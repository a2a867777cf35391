"""Makes what web/ ships and what docs/watch-in-a-browser.md states.

    python -m bench.browser record file:///…/bucket#demo --every 4    web/run: a signed run of some of its versions
    python -m bench.browser play --games 200                          web/test/greedy.json: vLLM's greedy games on it
    python -m bench.browser speed                                     decoding by Python and by Node, sizes of the page
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from delta_weight_sync import Publisher, codec
from delta_weight_sync.reader import RunReader, split_run
from delta_weight_sync.records import Manifest
from delta_weight_sync.signing import SIGNING_KEY, SigningKey, new_pair
from delta_weight_sync.store import open_bucket
from env_space.game import answers, guesses, rules_from
from env_space.settings import Settings

WEB = Path(__file__).parents[1] / "web"
POLICY = WEB.parent / "trainer" / "policies" / "wordle-tiny"
RUN = "demo"
MARKS = {"open": '<tool_call>\n{"name": "guess", "arguments": {"word": "', "close": '"}}\n</tool_call>'}


def record(url: str, every: int) -> None:
    """Publish every `every`-th version of a run anew, signed with a key that nobody keeps."""
    folder, source = WEB / "run", RunReader(*_opened(url))
    shutil.rmtree(folder, ignore_errors=True)
    newest = source.manifest().version
    key = new_pair()[SIGNING_KEY]
    options: dict[str, Any] = {"encoding": "small", "state_minutes": 1e9, "signing_key": key}
    with Publisher(f"{folder.as_uri()}#{RUN}", base=POLICY, **options) as publisher:
        for version in range(0, newest + 1, every):
            with tempfile.TemporaryDirectory() as scratch:
                bits = source.checkout(source.manifest(version), Path(scratch))
            weights = {name: torch.from_numpy(b).view(torch.bfloat16) for name, b in bits.items()}
            publisher.publish(weights, version)
            publisher.flush()
    for unused in ("state", "log"):
        shutil.rmtree(folder / "runs" / RUN / unused, ignore_errors=True)
    keys = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    (folder / "keys.json").write_text(json.dumps(keys, indent=0) + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {len(keys)} objects, {size} bytes, signed by {SigningKey(key).public}")


def _opened(url: str) -> tuple[Any, str]:
    place, run = split_run(url)
    return open_bucket(place), run or RUN
