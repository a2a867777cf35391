"""huggingface_hub 1.33, which older environments hold, talks to a bucket as the newest release does.

It cannot share an environment with the rest of the suite, so it gets one of its own.
"""

import os
import subprocess
import venv
from pathlib import Path
from uuid import uuid4

import pytest

from delta_weight_sync.errors import ObjectMissingError
from delta_weight_sync.store import open_bucket
from tests.support.hubsim import HubSim

ROOT = Path(__file__).parents[2]
OLD_CLIENT = """
import sys
from pathlib import Path
import huggingface_hub
from delta_weight_sync.errors import ObjectMissingError
from delta_weight_sync.store import open_bucket

url, folder = sys.argv[1], Path(sys.argv[2])
bucket = open_bucket(url, create=True)
assert bucket.get("from/new") == b"hello"
bucket.put("from/old", b"x" * 100_000)
bucket.put("from/old", b"y" * 100_000)
bucket.fetch("from/old", folder / "fetched", 100_000)
assert (folder / "fetched").read_bytes() == b"y" * 100_000
assert [(o.key, o.size) for o in bucket.list("from/")] == [("from/new", 5), ("from/old", 100_000)]
notice, polls = bucket.notifications("from/"), 0
while notice.describe(1.0) != "notified by the store":
    notice.due(1.0)
    notice.wait(1.0)
    assert (polls := polls + 1) < 60
notice.close()
bucket.delete(["from/new"])
assert bucket.stat("from/new") is None
try:
    bucket.get("from/new")
except ObjectMissingError:
    print("done with", huggingface_hub.__version__)
"""


@pytest.mark.long
@pytest.mark.usefixtures("hub_env")
def test_the_old_client_and_the_new_one_share_a_bucket(hub: HubSim, tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "huggingface_hub==1.33.0"]
    subprocess.run(install, check=True, capture_output=True)

    url = f"hf://buckets/team/{uuid4().hex}"
    bucket = open_bucket(url, create=True)
    bucket.put("from/new", b"hello")
    environment = {**os.environ, **hub.env(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [python, "-c", OLD_CLIENT, url, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert result.stdout == "done with 1.33.0\n", result.stderr
    assert bucket.get("from/old") == b"y" * 100_000
    with pytest.raises(ObjectMissingError):
        bucket.get("from/new")
