"""A run with `adapter=True` holds the adapter as PEFT saves it, exact in 16 bits, and PEFT loads it."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from delta_weight_sync import ConfigError, Publisher, Run, follow
from delta_weight_sync.reader import open_run
from tests import forked
from tests.support.models import SIZE, build, same_bits

HIDDEN = SIZE["hidden_size"]


def adapt(autocast: bool = True, **options: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(build("llama"), LoraConfig(**settings), autocast_adapter_dtype=autocast)


@torch.no_grad()
def move(model: Any, seed: int) -> None:
    """Change all that training changes, some of it by single bits, some by much."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            step = torch.randn(parameter.shape, generator=generator)
            touched = torch.rand(parameter.shape, generator=generator) < 0.3
            parameter += (0.02 * step * touched).to(parameter.dtype)


def quantized(model: Any) -> Any:
    """The base's layers as bitsandbytes leaves them: packed bytes of another shape."""
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            packed = torch.zeros(module.base_layer.weight.numel() // 2, 1, dtype=torch.uint8)
            module.base_layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    return model


def saved(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that PEFT itself would save."""
    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return found


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.bfloat16()


def different(model: Any, found: dict[str, torch.Tensor]) -> list[str]:
    """Names of the adapter's tensors that have other values, in 16 bits, in `found`."""
    wanted = saved(model)
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not same_bits(half(wanted[name]).float(), found[name].float())]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"{(tmp_path / 'bucket').as_uri()}#lora"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"autocast": False},
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
        {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"k_proj": 5}},
        {"alpha_pattern": {"self_attn.q_proj": 5, "q_proj": 3}},  # the first that fits counts
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ],
    ids=["float32", "bf16", "rslora", "patterns", "overlapping patterns", "head, embedding"],
)
def test_peft_loads_a_checkout_with_the_bits_that_were_published(options, url, tmp_path):
    model = adapt(**options)
    with Publisher(url, adapter=True) as publisher:
        publisher.publish(model)
        move(model, 1)
        publisher.publish(model)
        assert publisher.digest(model) == publisher.flush().digest
    folder = tmp_path / "out"
    Run(url).checkout(folder)
    assert sorted(path.name for path in folder.glob("[!.]*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = PeftModel.from_pretrained(build("llama"), folder)
    assert different(model, saved(loaded)) == []
    scales = [
        {
            name: module.scaling["default"]
            for name, module in each.named_modules()
            if isinstance(module, LoraLayer)
        }
        for each in (model, loaded)
    ]
    assert scales[0] == scales[1]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_50_syncs_of_random_changes_are_followed_bit_for_bit(dtype, url, tmp_path):
    model = adapt()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().to(dtype))
    with (
        Publisher(url, adapter=True) as publisher,
        follow(url, tmp_path / "followed", poll_s=0.01) as versions,
    ):
        for sync in range(50):
            move(model, sync)
            publisher.publish(model)
            publisher.flush()
            folder = next(versions).path
            assert different(model, load_file(folder / "adapter_model.safetensors")) == []
    loaded = PeftModel.from_pretrained(build("llama"), folder)
    assert different(model, saved(loaded)) == []


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "DoRA": (
        lambda: adapt(use_dora=True),
        r"'default' has use_dora=True, which vLLM does not serve .*: train",
    ),
    "modules_to_save": (lambda: adapt(modules_to_save=["lm_head"]), r"has modules_to_save=\['lm_head'\]"),
    "bias": (lambda: adapt(bias="all"), "has bias='all'"),
    "stacks": (
        lambda: adapt(target_modules=[], target_parameters=["q_proj.weight"]),
        r"has target_parameters=\['q_proj.weight'\]",
    ),
    "tokens": (
        lambda: adapt(target_modules=["q_proj"], trainable_token_indices=[3]),
        r"has trainable_token_indices=\[3\]",
    ),
    "LoRA-GA": (lambda: with_start(adapt(), "lora_ga"), "has init_lora_weights='lora_ga'"),
    "PiSSA": (lambda: adapt(init_lora_weights="pissa"), "has init_lora_weights='pissa'"),
    "IA3": (
        lambda: get_peft_model(
            build("llama"), peft.IA3Config(target_modules=["up_proj"], feedforward_modules=["up_proj"])
        ),
        "is of PEFT's type IA3, which vLLM does not serve: train a plain `LoraConfig`",
    ),
    "a scale of its own": (
        lambda: scaled(adapt()),
        r"q_proj scales its adapter by .*, but its config by 1.5, .*: undo `set_scale`",
    ),
    "two active": (lambda: two(adapt()), "the model has 2 active adapters: activate one with"),
    "more is trained": (
        lambda: trained(adapt(), "base_model.model.model.norm.weight"),
        "model.norm.weight is trained, but is no part of adapter 'default': freeze it",
    ),
    "no adapter": (lambda: build("llama"), "publish the PeftModel, .* not a LlamaForCausalLM"),
    "named tensors": (lambda: saved(adapt()), "publish the PeftModel, .* not a dict"),
}


def scaled(model: Any) -> Any:
    model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").set_scale("default", 1 / 3)
    return model


def with_start(model: Any, name: str) -> Any:
    model.peft_config["default"].init_lora_weights = name
    return model


def two(model: Any) -> Any:
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


def trained(model: Any, name: str) -> Any:
    model.get_parameter(name).requires_grad_(True)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_no_server_computes_alike_is_refused_before_anything_is_published(case, url):
    make, sentence = REFUSED[case]
    model = make()
    with pytest.raises(ConfigError, match=sentence), Publisher(url, adapter=True) as publisher:
        publisher.publish(model)
    assert open_run(url).newest() is None


def test_a_run_does_not_go_back_to_an_untrained_adapter(url):
    """Its digest is not that of version 0, because each start draws another one."""
    model = adapt()
    with Publisher(url, adapter=True) as publisher:
        publisher.publish(model)
        move(model, 1)
        publisher.publish(model)
    torch.manual_seed(1)
    with pytest.raises(ConfigError, match="fresh=True"), Publisher(url, adapter=True) as publisher:
        publisher.publish(adapt())
    assert open_run(url).newest().version == 1
    with Publisher(url, adapter=True) as publisher:
        publisher.publish(model)
        move(model, 2)
        publisher.publish(model)
    with Publisher(url, adapter=True, fresh=True) as publisher:
        publisher.publish(adapt())
    assert open_run(url).newest().version == 4


def test_the_adapter_of_a_quantized_base_is_published_with_the_names_of_the_active_one(url, tmp_path):
    model = quantized(adapt())
    model.add_adapter("model", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("model")
    with Publisher(url, adapter=True) as publisher:
        publisher.publish(model)
    folder = tmp_path / "out"
    Run(url).checkout(folder)
    wanted = peft.get_peft_model_state_dict(model, adapter_name="model", save_embedding_layers=False)
    found = load_file(folder / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    assert all("q_proj" in name and same_bits(half(wanted[name]), found[name]) for name in wanted)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2


def test_a_trainer_resumes_from_a_state_and_publishes_what_an_unbroken_one_does(url, tmp_path):
    def trainer() -> tuple[Any, torch.optim.Optimizer]:
        model = quantized(adapt(target_modules=["q_proj", "v_proj"]))
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)

    def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    digests = []
    for ends in ((4,), (2, 4)):
        place = f"{url}{len(digests)}"
        for end in ends:
            model, optimizer = trainer()
            with Publisher(place, adapter=True, state_minutes=0) as publisher:
                publisher.restore(model, optimizer)
                for sync in range(publisher.repeated_sync + 1, end + 1):
                    step(model, optimizer, sync)
                    publisher.publish(model, sync)
                    publisher.save_state(model, optimizer, final=True)
        digests.append([manifest.digest for manifest in Run(place).versions()])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 4


def test_a_run_keeps_its_kind_and_the_meaning_of_its_tensors(url, tmp_path):
    with Publisher(url, adapter=True) as publisher:
        publisher.publish(adapt())
        with pytest.raises(ConfigError, match="has lora_alpha=8, but the run has 6: choose another run name"):
            publisher.publish(adapt(lora_alpha=8))
    with (
        pytest.raises(ConfigError, match="has lora_alpha=8, but the run has 6"),
        Publisher(url, adapter=True) as publisher,
    ):
        publisher.publish(adapt(lora_alpha=8))
    build("llama").save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"versions of run 'lora' hold an adapter: .* or set adapter=True"):
        Publisher(url, tmp_path / "base")
    with pytest.raises(ConfigError, match="needs no base, because the adapter's config names it"):
        Publisher(url, tmp_path / "base", adapter=True)
    whole = f"{url}-whole"
    with Publisher(whole, tmp_path / "base") as publisher:
        publisher.publish(build("llama"))
    with pytest.raises(ConfigError, match=r"hold whole weights: .* or leave out adapter=True"):
        Publisher(whole, adapter=True)


def shared(rank: int, folder: Path, layout: str) -> None:
    """Publish a model that every rank holds, whole or sharded; the main rank compares."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = adapt(autocast=False, target_modules=["q_proj", "down_proj", "embed_tokens"])
    move(model, 1)
    if layout == "fsdp":
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
    url = f"{(folder / 'bucket').as_uri()}#lora"
    with Publisher(url, adapter=True) as publisher:
        publisher.publish(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.01
        publisher.publish(model)
        publisher.flush()
    wanted = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in saved(model).items()
    }
    if rank == 0:
        Run(url).checkout(folder / "out")
        found = load_file(folder / "out" / "adapter_model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(same_bits(wanted[name], found[name]) for name in wanted)
        loaded = PeftModel.from_pretrained(build("llama"), folder / "out")
        assert saved(loaded).keys() == wanted.keys()


@pytest.mark.full
@pytest.mark.parametrize("layout", [pytest.param("copies", marks=pytest.mark.long), "fsdp"])
def test_several_ranks_publish_one_file(layout, tmp_path):
    assert forked.ranks(shared, 2, tmp_path, layout) == [0, 0]
