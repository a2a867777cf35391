"""A vLLM that was started in a way that no delta fits is refused in words, before its routes are learned."""

from types import SimpleNamespace

import pytest

from delta_weight_sync.vllm.worker import call

FOLLOWED = {"data_parallel_size": 1, "enable_eplb": False, "world_size": 1}


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (
            {"data_parallel_size": 2},
            "a mixture of experts whose engines compute together (--data-parallel-size) cannot take a commit"
            " between two steps of all of them; start one replica per copy",
        ),
        (
            {"enable_eplb": True},
            "--enable-eplb moves experts away from where deltas go; start vLLM without it",
        ),
    ],
)
def test_options_that_move_weights_are_refused(option, sentence):
    config = SimpleNamespace(parallel_config=SimpleNamespace(**FOLLOWED | option))
    answer = call(SimpleNamespace(vllm_config=config), "learn", shapes={})
    assert answer == {"error": sentence, "kind": "route"}
