"""The run files for one GPU: options that TRL and the trainer know, with what their task needs."""

from pathlib import Path

import pytest
from trl import TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig

from trainer.settings import Settings

CONFIGS = Path(__file__).parents[2] / "trainer" / "configs"
WHERE = "--bucket hf://buckets/me/wordle --run first --replicas https://r --env_url https://e"


@pytest.mark.parametrize("name", ["qwen3_0_6b", "qwen3_1_7b", "qwen3_0_6b_reverse_text"])
def test_only_the_addresses_are_missing(name, tmp_path):
    # bf16 autocast is checked against the hardware when it is parsed
    options = ["--config", str(CONFIGS / f"{name}.yaml"), "--bf16", "false", "--output_dir", str(tmp_path)]
    parser = TrlParser((Settings, AsyncGRPOConfig))
    script, config = parser.parse_args_and_config([*options, *WHERE.split()])
    assert "/Qwen3-" in script.model
    assert script.replicas == ["https://r"]
    assert config.per_device_train_batch_size % config.num_generations == 0, "a step has whole groups"
    assert config.dtype == "float32", "small steps are not rounded away"
    if script.task == "wordle":
        assert config.chat_template_kwargs == {"enable_thinking": False}
        assert config.max_tool_calling_iterations == 6, "all guesses"
        assert config.max_completion_length == 1024
        turns = config.max_tool_calling_iterations + 1
        assert config.token_budget > turns * config.max_completion_length + 500, "the longest game fits"
    else:
        assert script.task == "reverse_text"
