"""The run files for one GPU: options that TRL and the trainer know, with what their task needs."""

from pathlib import Path

import pytest
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig

from trainer.settings import Settings

CONFIGS = Path(__file__).parents[2] / "trainer" / "configs"
WHERE = [
    "--bucket",
    "hf://buckets/me/wordle",
    "--run",
    "first",
    "--replicas",
    "https://r",
    "--env_url",
    "https://e",
]


GAMES = ["qwen3_0_6b", "qwen3_1_7b"]
games = pytest.mark.parametrize("parsed", GAMES, indirect=True)
all_tasks = pytest.mark.parametrize("parsed", [*GAMES, "qwen3_0_6b_reverse_text"], indirect=True)


@pytest.fixture
def parsed(request, tmp_path):
    parser = TrlParser((Settings, AsyncGRPOConfig))
    options = ["--config", str(CONFIGS / f"{request.param}.yaml"), *WHERE]
    # bf16 autocast is checked against the hardware when it is parsed
    return parser.parse_args_and_config([*options, "--bf16", "false", "--output_dir", str(tmp_path)])


@all_tasks
def test_only_the_addresses_are_missing(parsed):
    script, _ = parsed
    assert "/Qwen3-" in script.model
    assert script.task in ("wordle", "reverse_text")
    assert script.replicas == ["https://r"]


@games
def test_the_policy_does_not_think_and_may_make_six_guesses(parsed):
    _, args = parsed
    assert args.chat_template_kwargs == {"enable_thinking": False}
    assert args.max_tool_calling_iterations == 6
    assert args.max_completion_length == 1024


@games
def test_no_game_is_longer_than_a_forward_pass_may_be(parsed):
    _, args = parsed
    turns = args.max_tool_calling_iterations + 1
    assert args.token_budget > turns * args.max_completion_length + 500


@all_tasks
def test_a_step_has_whole_groups(parsed):
    _, args = parsed
    assert args.per_device_train_batch_size % args.num_generations == 0


@all_tasks
def test_small_steps_are_not_rounded_away(parsed):
    _, args = parsed
    assert args.dtype == "float32"
