"""Models with PEFT's adapters are published as `W + scale * B @ A`, rounded once; the base is only read."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from delta_weight_sync import CodecError, ConfigError, Publisher, StateError, follow
from delta_weight_sync.publish import adapters
from delta_weight_sync.reader import open_run
from tests import forked
from tests.support.models import SIZE, build, same_bits, save, train

HIDDEN = SIZE["hidden_size"]
CLASSES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "tied": lambda: transformers.LlamaConfig(**{**SIZE, "tie_word_embeddings": True}),
    "biased": lambda: transformers.Qwen2Config(**SIZE),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=1, n_head=4),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZE, num_local_experts=4, num_experts_per_tok=2, head_dim=32, layer_types=["full_attention"] * 2
    ),
}
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
TOKENS = {"trainable_token_indices": [3, 5, 127]}


def make(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    if name not in CLASSES:
        return build(name).to(dtype)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CLASSES[name]()).to(dtype)


def adapt(model: Any, autocast: bool = True, **options: Any) -> Any:
    """The model with adapters whose values are as far from their start as after long training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of Conv1D and of tied weights
        settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | options
        adapted = get_peft_model(model, LoraConfig(**settings), autocast_adapter_dtype=autocast)
    move(adapted)
    return adapted


@torch.no_grad()
def move(adapted: Any, seed: int = 1) -> None:
    """Change all that training changes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def two(model: Any) -> Any:
    """Two adapters that are active together, on different layers; a third one is not active."""
    adapted = adapt(model, target_modules=["q_proj", "down_proj"])
    for name in ("second", "idle"):
        settings = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "k_proj"]}
        adapted.add_adapter(name, LoraConfig(**settings, init_lora_weights=False))
    adapted.base_model.set_adapter(["default", "second"])
    return adapted


CASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "all linear layers": ("llama", adapt),
    "in bf16": ("llama", lambda m: adapt(m, autocast=False)),
    "tied": ("tied", adapt),
    "patterns, rsLoRA": (
        "llama",
        lambda m: adapt(m, rank_pattern={"q_proj": 7}, alpha_pattern={"k_proj": 5}, use_rslora=True),
    ),
    "a scale of its own": ("llama", lambda m: scaled(adapt(m))),
    "two active": ("llama", two),
    "none active": ("llama", lambda m: activated(adapt(m), [])),
    "head, embedding": ("llama", lambda m: adapt(m, target_modules=["embed_tokens", "lm_head", "q_proj"])),
    "DoRA": ("llama", lambda m: adapt(m, use_dora=True)),
    "DoRA of an embedding": ("llama", lambda m: adapt(m, target_modules=["embed_tokens"], use_dora=True)),
    "DoRA of Conv1D": ("gpt2", lambda m: adapt(m, target_modules=["c_attn", "c_proj"], use_dora=True)),
    "Conv1D": ("gpt2", lambda m: adapt(m, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)),
    "its own bias": ("biased", lambda m: adapt(m, target_modules=["q_proj", "v_proj"], lora_bias=True)),
    "the base's biases": ("biased", lambda m: adapt(m, target_modules=["q_proj", "v_proj"], bias="all")),
    "modules_to_save": ("llama", lambda m: adapt(m, modules_to_save=["lm_head", "embed_tokens", "norm"])),
    "tokens": ("llama", lambda m: adapt(m, target_modules=["q_proj"], **TOKENS)),
    "tokens of a tied embedding": ("tied", lambda m: adapt(m, target_modules=["q_proj"], **TOKENS)),
    "stacks [experts, out, in]": ("qwen3_moe", lambda m: adapt(m, target_parameters=STACKS)),
    "stacks [experts, in, out]": ("gpt_oss", lambda m: adapt(m, target_parameters=STACKS)),
    "a plain parameter": (
        "llama",
        lambda m: adapt(m, target_modules=[], target_parameters=["q_proj.weight"]),
    ),
    "PiSSA": ("llama", lambda m: adapt(m, init_lora_weights="pissa")),
    "mixed": ("llama", lambda m: mixed(m)),
    "added by transformers": ("llama", lambda m: added(m)),
    "inside torch.compile": ("llama", lambda m: torch.compile(adapt(m))),
    "inside of a wrapper": ("llama", lambda m: torch.nn.DataParallel(adapt(m))),
    "around torch.compile": ("llama", lambda m: compiled_layers(adapt(m))),
}


def scaled(adapted: Any) -> Any:
    adapted.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").set_scale("default", 1 / 3)
    return adapted


def activated(adapted: Any, names: list[str]) -> Any:
    adapted.base_model.set_adapter(names)
    return adapted


def added(model: Any) -> Any:
    model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    return model


def mixed(model: Any) -> Any:
    settings = {"target_modules": ["q_proj"], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**settings), mixed=True)


def compiled_layers(adapted: Any) -> Any:
    layers = adapted.get_submodule("base_model.model.model.layers")
    layers[0] = torch.compile(layers[0])
    return adapted


def exact(adapted: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """PEFT's own merge of a copy in float64, rounded once."""
    model = copy.deepcopy(adapters.unwrapped(adapted)).double()
    if isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        model = model.merge_and_unload()
    else:
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.Linear):
                module.merge()
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in model.state_dict().items()}
    return {
        name.replace(".base_layer", ""): rounded(tensor, dtype)
        for name, tensor in state.items()
        if "lora_" not in name
    }


def rounded(values: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The nearest 16-bit values. torch rounds float64 to float32 on the way, so look at neighbours, too."""
    near = values.to(dtype).view(torch.int16)
    found = torch.stack([near, near - 1, near + 1]).view(dtype)
    return found.gather(0, (found.double() - values).abs().nan_to_num(torch.inf).argmin(0, keepdim=True))[0]


def different(adapted: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Names of tensors that `from_pretrained` of a version loads with other bits than the exact ones."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    return [name for name, each in exact(adapted, dtype).items() if not same_bits(each, loaded[name])]


def newest(url: str, into: Path) -> Path:
    (version,) = follow(url, into=into, once=True)
    return version.path


def frozen(adapted: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in adapted.named_parameters() if not p.requires_grad}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    adapters._peft.cache_clear()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"{(tmp_path / 'bucket').as_uri()}#lora"


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # in torch.compile itself
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)], ids=["bf16", "float32"]
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.full
def test_versions_hold_the_exact_sum_rounded_once(case, dtype, url, tmp_path):
    name, make_adapters = CASES[case]
    if "PiSSA" in case and dtype == torch.float32:
        pytest.skip("the base is changed at the start, as in bf16")
    model = make(name, dtype)
    base = save(model.bfloat16() if dtype == torch.bfloat16 else model, tmp_path / "base")
    adapted = make_adapters(model)
    before = frozen(adapted)
    with Publisher(url, base) as publisher:
        publisher.publish(adapted)
        move(adapted, 2)
        publisher.publish(adapted)
        publisher.flush()
        assert publisher.digest(adapted) == publisher.flush().digest
    assert different(adapted, newest(url, tmp_path / "followed")) == []
    after = dict(adapted.named_parameters())
    assert all(same_bits(tensor, after[name].detach()) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [(torch.float16, torch.float16), (torch.float16, torch.float32), (None, torch.float64)],
)
def test_other_dtypes_are_rounded_once_to_that_of_the_version(saved, dtype, url, tmp_path):
    base = save(make("llama", saved or torch.bfloat16), tmp_path / "base")
    adapted = adapt(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype))
    before = frozen(adapted)
    with Publisher(url, base) as publisher:
        publisher.publish(adapted)
        move(adapted, 2)
        publisher.publish(adapted)
    assert different(adapted, newest(url, tmp_path / "followed"), saved or torch.bfloat16) == []
    after = dict(adapted.named_parameters())
    assert all(same_bits(tensor, after[name].detach()) for name, tensor in before.items())


@pytest.mark.full
def test_after_50_syncs_of_training_the_base_has_its_bits(url, tmp_path):
    model = make("llama")
    base = save(model, tmp_path / "base")
    adapted = adapt(model)
    before = frozen(adapted)
    with Publisher(url, base) as publisher:
        for _ in range(50):
            train(adapted, 1)
            publisher.publish(adapted)
    assert open_run(url).manifest().sync == 50
    assert different(adapted, newest(url, tmp_path / "followed")) == []
    after = dict(adapted.named_parameters())
    assert before
    assert all(same_bits(tensor, after[name].detach()) for name, tensor in before.items())


def test_values_halfway_between_two_of_16_bits_are_not_rounded_twice():
    """Values at, just above and just below such a value go different ways, in bf16 and in float16."""
    for dtype, unit in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)):
        tie = 1 + unit / 2
        values = torch.tensor(
            [tie, tie + 2.0**-40, tie - 2.0**-40, tie + unit - 2.0**-40], dtype=torch.float64
        )
        wanted = torch.tensor([1.0, 1 + unit, 1.0, 1 + unit], dtype=dtype)
        for sign in (1, -1):
            assert torch.equal(adapters._odd(sign * values).to(dtype), sign * wanted)
    largest = torch.finfo(torch.float32).max
    odd = adapters._odd(torch.tensor([torch.inf, -torch.inf, torch.nan, 2.0 * largest, 0.0, 1e-60]).double())
    assert odd[:2].tolist() == [torch.inf, -torch.inf]
    assert odd[2].isnan()
    assert odd[3:].bfloat16().tolist() == [torch.inf, 0.0, 0.0]


REFUSED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "IA3": (
        "llama",
        lambda m: get_peft_model(
            m, peft.IA3Config(target_modules=["q_proj", "up_proj"], feedforward_modules=["up_proj"])
        ),
        "adapter 'default' is of PEFT's type IA3, .* train an adapter of a plain `LoraConfig`",
    ),
    "prompt": (
        "llama",
        lambda m: get_peft_model(m, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
        "adapter 'default' is of PEFT's type PROMPT_TUNING",
    ),
    "merged": (
        "llama",
        lambda m: called(adapt(m), "merge_adapter"),
        r"'default' is merged into model.layers.0.self_attn.q_proj: call `model.unmerge_adapter\(\)`",
    ),
    "disabled": (
        "llama",
        lambda m: called(adapt(m), "disable_adapter_layers"),
        "adapters of model.layers.0.self_attn.q_proj are disabled: publish outside of",
    ),
    "tied, one adapted": (
        "tied",
        lambda m: adapt(m, target_modules=["embed_tokens"]),
        "lm_head.weight and model.embed_tokens.weight are one tensor, .* set ensure_weight_tying=True",
    ),
    "aLoRA": (
        "llama",
        lambda m: adapt(m, alora_invocation_tokens=[5], task_type="CAUSAL_LM"),
        "q_proj is adapted by PEFT's ALoraLinearVariant, which cannot be merged exactly",
    ),
    "two, one of them DoRA": (
        "llama",
        lambda m: second(adapt(m, use_dora=True)),
        "q_proj has several active adapters, and one of them is DoRA, .* activate one",
    ),
    "a bias of its own, but none of the base": (
        "llama",
        lambda m: adapt(m, target_modules=["q_proj"], lora_bias=True),
        "q_proj.bias is no plain parameter, .* without `lora_bias` where a layer has no bias",
    ),
    "4-bit base": (
        "llama",
        lambda m: quantized(adapt(m, target_modules=["q_proj"])),
        r"q_proj.weight is quantized \(Parameter, uint8\): load the model in bf16",
    ),
    "attention of torch": (
        "llama",
        lambda m: adapt(with_attention(m), target_modules=["extra"]),
        "extra is adapted by PEFT's peft.tuners.lora.layer.MultiheadAttention, which cannot be merged",
    ),
}


def called(adapted: Any, method: str) -> Any:
    getattr(adapted, method)()
    return adapted


def second(adapted: Any) -> Any:
    adapted.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    adapted.base_model.set_adapter(["default", "second"])
    return adapted


def quantized(adapted: Any) -> Any:
    layer = adapted.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").base_layer
    packed = torch.zeros(HIDDEN * HIDDEN // 2, 1, dtype=torch.uint8)
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    layer.weight.quant_state = object()  # as bitsandbytes has it
    return adapted


def with_attention(model: Any) -> Any:
    model.model.extra = torch.nn.MultiheadAttention(HIDDEN, 4).bfloat16()
    return model


@pytest.mark.filterwarnings("ignore:.*lora_bias=True")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_before_anything_is_published(case, url, tmp_path):
    name, make_adapters, sentence = REFUSED[case]
    model = make(name)
    base = save(model, tmp_path / "base")
    adapted = make_adapters(model)
    with pytest.raises((ConfigError, CodecError), match=sentence), Publisher(url, base) as publisher:
        publisher.publish(adapted)
    assert open_run(url).newest() is None


def test_another_release_of_peft_is_named_but_only_for_a_model_that_has_adapters(url, tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "_CLASSES", adapters._CLASSES | {"peft.tuners.lora": ("Gone",)})
    adapters._peft.cache_clear()
    model = make("llama")
    base = save(model, tmp_path / "base")
    with Publisher(url, base) as publisher:
        publisher.publish(model)
        with pytest.raises(
            ConfigError, match=r"PEFT has no Gone in peft.tuners.lora, .* pip install 'peft>="
        ):
            publisher.publish(adapt(model))
    assert publisher.sync == 1


def test_a_refused_model_can_be_published_once_it_is_unmerged(url, tmp_path):
    model = make("llama", torch.float32)
    base = save(model, tmp_path / "base")
    adapted = adapt(model)
    with Publisher(url, base) as publisher:
        publisher.publish(adapted)
        with adapted.disable_adapter(), pytest.raises(ConfigError, match="are disabled: publish outside of"):
            publisher.publish(adapted)
        move(adapted, 2)
        publisher.publish(adapted)
    assert publisher.sync == 2
    assert different(adapted, newest(url, tmp_path / "followed")) == []


def test_a_tied_embedding_whose_head_has_the_same_adapter_is_published_once(url, tmp_path):
    model = make("tied", torch.float32)
    base = save(model, tmp_path / "base")
    settings = {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
    adapted = adapt(model, **settings)
    with Publisher(url, base) as publisher:
        publisher.publish(adapted)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        newest(url, tmp_path / "followed"), dtype="bfloat16"
    )
    layer = adapted.get_base_model().model.embed_tokens
    added = layer.lora_embedding_B["default"].double() @ layer.lora_embedding_A["default"].double()
    wanted = layer.base_layer.weight.double() + layer.scaling["default"] * added.T
    assert same_bits(loaded.model.embed_tokens.weight, rounded(wanted))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_head_that_only_the_trainer_ties_is_published_beside_the_embedding(url, tmp_path):
    model = make("llama")
    base = save(model, tmp_path / "base")
    model.lm_head.weight = model.model.embed_tokens.weight
    adapted = adapt(model, target_modules=["q_proj"])
    with Publisher(url, base) as publisher:
        publisher.publish(adapted)
        assert publisher.digest(adapted) == publisher.flush().digest
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        newest(url, tmp_path / "followed"), dtype="bfloat16"
    )
    embedding = adapted.get_base_model().model.embed_tokens.weight
    assert same_bits(loaded.model.embed_tokens.weight, embedding)
    assert same_bits(loaded.lm_head.weight, embedding)


def test_named_parameters_are_refused_with_what_to_publish(url, tmp_path):
    model = make("llama")
    base = save(model, tmp_path / "base")
    adapted = adapt(model)
    for weights in (
        adapted.named_parameters(),
        adapted.state_dict(),
        adapted.get_base_model().named_parameters(),
    ):
        with (
            pytest.raises(
                ConfigError, match=r"PEFT's name of a parameter.*: publish the model itself, `publish\("
            ),
            Publisher(url, base) as publisher,
        ):
            publisher.publish(weights)
    assert open_run(url).newest() is None


def test_a_trainer_resumes_from_a_state_that_holds_the_adapter(url, tmp_path):
    base = save(make("llama"), tmp_path / "base")

    def trainer() -> tuple[Any, torch.optim.Optimizer]:
        adapted = adapt(make("llama"))
        return adapted, torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)

    def step(adapted: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    adapted, optimizer = trainer()
    with Publisher(url, base, state_minutes=0) as publisher:
        publisher.publish(adapted)
        step(adapted, optimizer, 1)
        publisher.publish(adapted)
        assert publisher.save_state(adapted, optimizer, extra={"step": 1})
    whole = sum(p.nbytes for p in adapted.parameters())
    files = [path for path in (tmp_path / "bucket/runs/lora/state").rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) < whole, "the base is not in it"
    step(adapted, optimizer, 2)

    again, its_optimizer = trainer()
    with Publisher(url, base) as publisher:
        assert publisher.restore(again, its_optimizer) == {"step": 1}
        step(again, its_optimizer, 2)
        publisher.publish(again)
    assert different(adapted, newest(url, tmp_path / "followed")) == []

    other = adapt(make("llama"))
    with torch.no_grad():
        other.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").base_layer.weight.mul_(2)
    optimizer = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=1e-2)
    with (
        pytest.raises(StateError, match="the weights of this state are not those"),
        Publisher(url, base) as one,
    ):
        one.restore(other, optimizer)


def shared(rank: int, folder: Path, layout: str, dora: bool) -> None:
    """Publish a model that is sharded over the ranks; the main rank then compares."""
    warnings.simplefilter("ignore")
    adapted = adapt(make("llama"), target_modules=["q_proj", "down_proj", "embed_tokens"], use_dora=dora)
    wanted = exact(adapted)
    before = frozen(adapted)
    if layout == "fsdp":
        for layer in adapted.get_base_model().model.layers:
            fully_shard(layer.self_attn.q_proj)
            fully_shard(layer)
        fully_shard(adapted)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for module in adapted.modules():
            if isinstance(module, peft.tuners.lora.Linear):
                weight = module.base_layer.weight
                sharded = distribute_tensor(weight.data, mesh, [Shard(1)])
                module.base_layer.weight = torch.nn.Parameter(sharded, requires_grad=False)
    with Publisher(f"{(folder / 'bucket').as_uri()}#lora", folder / "base") as publisher:
        publisher.publish(adapted)
        publisher.publish(adapted)
        publisher.flush()
    for name, tensor in before.items():
        now = dict(adapted.named_parameters())[name].detach()
        assert same_bits(tensor, now.full_tensor() if isinstance(now, DTensor) else now)
    if rank == 0:
        path = newest(f"{(folder / 'bucket').as_uri()}#lora", folder / "followed")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
        assert [name for name, tensor in wanted.items() if not same_bits(tensor, loaded[name])] == []
        gathered = adapters.adapted(adapted, whole=True)
    else:
        gathered = adapters.adapted(adapted, whole=True)
    for name, tensor in gathered:  # as TRL hands them over
        assert same_bits(wanted[name], tensor.detach()), name


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("columns", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "dora", [pytest.param(False, id="lora"), pytest.param(True, id="dora", marks=pytest.mark.long)]
)
def test_sharded_models_publish_the_same_bits(layout, dora, tmp_path):
    save(make("llama"), tmp_path / "base")
    assert forked.ranks(shared, 2, tmp_path, layout, dora) == [0, 0]
