"""A model that takes images follows a run: after a commit, it sees with the new weights."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import WEIGHTS, read_bits, write_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.vllm import hooks
from tests.live.test_engine import ENVIRONMENT, moved
from tests.support import tiny_sight

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.skipif(not hooks.MEDIA.works(), reason="this vLLM cannot forget encoded images"),
]


@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_images_are_encoded_again_after_a_commit(tmp_path, tower):
    """All images are asked about before and after, so vLLM would find them encoded by the old weights."""
    tiny_sight.build(tmp_path / "base")
    base = dict(read_bits(tmp_path / "base"))
    rng = np.random.default_rng(0)
    seeing = [name for name in base if "vision" in name]
    assert len(seeing) > 10
    frozen = seeing if tower == "frozen" else []
    new = {name: bits if name in frozen else moved(bits, rng) for name, bits in base.items()}
    shutil.copytree(tmp_path / "base", tmp_path / "next", ignore=shutil.ignore_patterns("*.safetensors"))
    write_bits({name: bits.shape for name, bits in new.items()}, new.__getitem__, tmp_path / "next" / WEIGHTS)
    for file, old, to in (("delta", base, new), ("back", new, base)):
        patches = [codec.diff(name, old[name], to[name]) for name in base]
        (tmp_path / file).write_bytes(codec.encode(patches, old.__getitem__, base=0, version=1))

    words = [sys.executable, "-m", "tests.live.images", str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(words, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=log)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["learned"] == to_hex(state_digest(base))
    assert found["kept"] == 3, "vLLM kept the encoded images"
    assert found["halfway"] == 3, "commits came in the middle of images"
    assert found["beside"] == [32] * 3, "these requests went on"
    assert found["after"] == found["fresh"]
    assert found["after"] != found["before"]
