"""vLLM's own engine takes commits between steps: exact, undone whole, every token labelled, no stale prefix.

engine.py steps an engine in a process of its own, without a server.
"""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from delta_weight_sync import codec
from delta_weight_sync.checkpoint import WEIGHTS, read_bits, write_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.vllm import hooks
from tests.support import tiny_policy as tiny

pytestmark = pytest.mark.live

BLOCK = 32
ENVIRONMENT = {
    **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "delta_weight_sync"},
    **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, one that differs in some of every tensor, and the deltas between them."""
    folder = tmp_path_factory.mktemp("engine")
    tiny.build(folder / "base", tie=True, seed=0)
    base = dict(read_bits(folder / "base"))
    rng = np.random.default_rng(0)
    new = {name: moved(bits, rng) for name, bits in base.items()}
    shutil.copytree(folder / "base", folder / "next", ignore=shutil.ignore_patterns("*.safetensors"))
    shapes = {name: bits.shape for name, bits in new.items()}
    write_bits(shapes, new.__getitem__, folder / "next" / WEIGHTS)
    for name, old, to in (("delta", base, new), ("back", new, base)):
        patches = [codec.diff(tensor, old[tensor], to[tensor]) for tensor in old]
        (folder / name).write_bytes(codec.encode(patches, old.__getitem__, base=0, version=1))
    return folder


def moved(bits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    flat = bits.reshape(-1).copy()
    index = rng.permutation(flat.size)[: max(1, flat.size // 10)]
    flat[index] += rng.integers(1, 40, index.size).astype(np.uint16)
    return flat.reshape(bits.shape)


@pytest.fixture(scope="module")
def seen(folder) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.live.engine", str(folder)]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=log)
    assert done.returncode == 0, (folder / "log").read_text()[-3000:]
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith(b"{"):
            found |= json.loads(line)
    return found


def test_the_live_weights_have_the_digest_of_the_checkpoint(seen, folder):
    assert seen["loaded"] == to_hex(state_digest(dict(read_bits(folder / "base"))))
    assert seen["fresh"]["digest"] == to_hex(state_digest(dict(read_bits(folder / "next"))))


def test_committed_weights_answer_as_freshly_loaded_ones(seen):
    assert seen["commits"]["after"] == seen["fresh"]["answers"] != seen["commits"]["before"]
    assert seen["back"] == seen["commits"]["before"], "the delta that leads back"


def test_a_commit_that_fails_is_undone_whole(seen):
    found = seen["commits"]
    assert "the published one is 0000000000000000" in found["wrong_digest"]
    assert "elements read back differently" in found["wrong_write"]
    assert found["undone"]
    assert found["as_before"]


def test_weights_that_somebody_overwrote_are_healed_in_place(seen):
    found = seen["healed"]
    assert "something else changed the live weights" in found["refused"]
    assert found["as_before"]
    assert found["whole"] == "", "deltas are taken again"


def test_steps_that_were_under_way_keep_the_old_version(seen):
    """At every possible moment: logprobs change with the weights exactly where the label does."""
    if not hooks.LABELS.works():
        pytest.skip("this vLLM labels no tokens")
    undisturbed = {line["prompt"]: line["logprobs"] for line in seen["labels"] if not line["commit_after"]}
    disturbed = [line for line in seen["labels"] if line["commit_after"]]
    assert all(line["under_way"] == 1 for line in disturbed)
    assert len({line["spans"][0][2] for line in disturbed}) > 5
    for line in disturbed:
        (first, _, end), (second, start, _) = line["spans"]
        changed = [a != b for a, b in zip(line["logprobs"], undisturbed[line["prompt"]], strict=True)]
        assert (first, second, start) == ("old", "new", end)
        assert changed.index(True) == end


def test_a_prefix_never_outlives_its_weights(seen):
    """Requests follow a running one whose blocks stand on old keys and values; a fresh engine agrees."""
    chase = seen["chase"]
    assert chase["cached"] == BLOCK, "before the commit prefixes are found"
    assert chase["beside"], "the one that is followed outlives its followers"
    expected = [0, *((len(prompt) - 1) // BLOCK * BLOCK for prompt in chase["prompts"][:-1])]
    assert [cached for cached, _ in chase["found"]] == expected
    assert chase["found"] == seen["chase_fresh"]


def test_a_vllm_that_keeps_prefixes_elsewhere_is_refused(seen):
    assert "drop --kv-transfer-config" in seen["connector"]
