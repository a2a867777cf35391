"""A bucket of the Hub leaves the process of its user as it was."""

import json
import os
import subprocess
import sys
from uuid import uuid4

import pytest

from delta_weight_sync.store import DIRECT

# A program with a client of its own for huggingface_hub, which uses a bucket and the Hub.
PROGRAM = f"""
import json, os, sys
from pathlib import Path
from huggingface_hub import HfApi, close_session, get_session, set_client_factory
from huggingface_hub.utils import are_progress_bars_disabled
from huggingface_hub.utils._http import default_client_factory

seen = []

def client():
    made = default_client_factory()
    made.timeout = 123.0
    made.event_hooks["request"].append(lambda request: seen.append(request))
    return made

set_client_factory(client)
before = dict(os.environ)

from delta_weight_sync.store import open_bucket

bucket = open_bucket(sys.argv[1], create=True)
bucket.put("small", b"a")
bucket.put("large", bytes(range(256)) * ({DIRECT} // 256 + 1))
assert bucket.get("small") == b"a"
assert len(bucket.fetch("large", Path(sys.argv[2]), 10 * {DIRECT})) == 64
close_session()  # as huggingface_hub does after a connection failed
assert bucket.get("small") == b"a"
timeouts = {{request.extensions["timeout"]["read"] for request in seen}}
del seen[:]
HfApi().whoami()
print(json.dumps({{
    "environment": dict(os.environ) == before,
    "bars": not are_progress_bars_disabled(),
    "own client": get_session().timeout.read,
    "bucket": sorted(timeouts),
    "others": [request.extensions["timeout"]["read"] for request in seen],
    "requests": sum(each.requests for each in bucket.ledger.counts().values()),
}}))
"""


@pytest.mark.usefixtures("hub_env")
def test_opening_a_bucket_changes_nothing_in_the_users_process(tmp_path) -> None:
    url = f"hf://buckets/team/{uuid4().hex}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, str(tmp_path / "large")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["environment"]
    assert found["bars"]
    assert found["own client"] == 123.0
    assert found["bucket"] == [10.0], "each request of the bucket has its own limit"
    assert found["others"] == [123.0], "and no other request"
    assert found["requests"] > 5
    assert "%|" not in done.stderr, "no progress bar is shown"
