"""What a version takes from the checkpoint that a run starts from: which files, which dtypes, which head."""

import contextlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from delta_weight_sync import CheckpointError, CodecError, ConfigError, Publisher, follow
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import open_run
from delta_weight_sync.signing import make_keys
from tests.support.models import SIZE, build, loads_as, same_bits, save

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
PROJ = "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model() -> Any:
    return build("llama")


@pytest.fixture
def base(model: Any, tmp_path: Path) -> Path:
    return save(model, tmp_path / "my-policy")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A base of a model that transformers does not know, with few weights."""
    folder = tmp_path / "my-policy"
    folder.mkdir()
    save_file({"w": torch.ones(20, 8, dtype=torch.bfloat16)}, folder / WEIGHTS)
    (folder / "config.json").write_text("{}")
    return folder


def edit(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def configure(folder: Path, **changes: object) -> Path:
    """Change the checkpoint's config; None removes an entry."""
    config = {name: value for name, value in (config_of(folder) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def stored(folder: Path) -> Tensors:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def fill(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}")


def url_of(base: Path) -> str:
    return f"{(base.parent / 'bucket').as_uri()}#run"


def publish(base: Path, syncs: Iterable[Any], **options: Any) -> Path:
    """Publish a version of each sync's weights. Return the folder of the newest one."""
    with Publisher(url_of(base), base=base, **options) as publisher:
        for weights in syncs:
            publisher.publish(weights)
            publisher.flush()
    return newest(base)


def newest(base: Path, into: str = "followed") -> Path:
    (version,) = follow(url_of(base), into=base.parent / into, once=True)
    return version.path


def refused(base: Path, weights: Any, *words: str, kind: type[Exception] = CheckpointError) -> None:
    """The weights are refused with a sentence that has all these words, and nothing of them is published."""
    with pytest.raises(kind) as caught:
        publish(base, [weights])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    bucket = base.parent / "bucket"
    assert not list(bucket.rglob("*.safetensors"))
    assert not bucket.exists() or open_run(url_of(base)).newest() is None


def without(model: Any, *names: str) -> list[tuple[str, torch.nn.Parameter]]:
    """What a trainer that froze the parameters `names` hands over."""
    return [(name, p) for name, p in model.named_parameters() if name not in names]


# What a trainer may call `publish` with.
GIVEN = {"model": lambda m: m, "parameters": without, "state_dict": lambda m: m.state_dict()}


def nudge(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def warnings_in(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


# Which files of the base count.


def ones(base: Path, name: str) -> Tensors:
    return {name: torch.ones_like(stored(base)[name])}


def sharded(base: Path, *, first: str = "weights") -> dict[str, str]:
    """Divide the checkpoint among two files, which an index names. Return which tensor is in which file."""
    tensors = stored(base)
    files = [f"{first}-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    (base / WEIGHTS).unlink()
    where = {name: files[number % 2] for number, name in enumerate(tensors)}
    for file in files:
        some = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        save_file(some, base / file, metadata={"format": "pt"})
    write_index(base, where)
    return where


def write_index(base: Path, where: object, name: str = INDEX) -> None:
    (base / name).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def stale_shard(base: Path) -> None:
    save_file(ones(base, EMBED), base / "model-00001-of-00002.safetensors")


def stale_shard_beside_an_index(base: Path) -> None:
    stale = ones(base, EMBED)
    sharded(base, first="model")
    save_file(stale, base / "model-00003-of-00003.safetensors")


def variant(base: Path) -> None:
    half = {name: tensor.half() for name, tensor in stored(base).items()}
    save_file(half, base / "model.fp16.safetensors", metadata={"format": "pt"})


def variant_in_shards(base: Path) -> None:
    half = {name: tensor.half() for name, tensor in stored(base).items()}
    save_file(half, base / "model.fp16-00001-of-00001.safetensors", metadata={"format": "pt"})
    write_index(base, dict.fromkeys(half, "model.fp16-00001-of-00001.safetensors"), f"{INDEX[:-5]}.fp16.json")


def stray_shard(base: Path) -> None:
    more = {"model.layers.7.mlp.up_proj.weight": torch.ones(64, 64, dtype=torch.bfloat16)}
    save_file(more, base / "model-00002-of-00002.safetensors")


def names_of_their_own(base: Path) -> None:
    sharded(base)


def names_of_their_own_in_a_folder(base: Path) -> None:
    (base / "shards").mkdir()
    sharded(base, first="shards/part")


def the_only_file(base: Path) -> None:
    (base / WEIGHTS).rename(base / "policy.safetensors")


def an_unfinished_download(base: Path) -> None:
    (base / "model-00002-of-00002.safetensors").write_bytes((base / WEIGHTS).read_bytes()[:5000])


@pytest.mark.parametrize(
    "clutter",
    [
        *(stale_shard, stale_shard_beside_an_index, variant, variant_in_shards, stray_shard),
        *(names_of_their_own, names_of_their_own_in_a_folder, the_only_file, an_unfinished_download),
    ],
)
def test_the_files_count_that_transformers_loads(clutter, model, base):
    """A frozen tensor comes from the file that the trainer has loaded, and no other file adds a tensor."""
    clutter(base)
    folder = publish(base, [without(model, EMBED)])
    assert stored(folder).keys() == dict(model.named_parameters()).keys()
    assert loads_as(model, folder) == []


@pytest.mark.parametrize("newer", ["one file", "shards"])
def test_of_one_file_and_shards_the_trainers_are_taken_or_both_are_refused_by_name(newer, model, base):
    """transformers loads the one file, and vLLM the shards that the index names."""
    one = load_file(base / WEIGHTS)
    sharded(base, first="model")
    save_file(one, base / WEIGHTS, metadata={"format": "pt"})
    for path in [base / WEIGHTS] if newer == "shards" else sorted(base.glob("model-*.safetensors")):
        old = load_file(path)
        save_file(old | {EMBED: one[EMBED] * 2} if EMBED in old else old, path, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    try:
        folder = publish(base, [without(model, EMBED)])
    except CheckpointError as error:
        assert INDEX in str(error)  # noqa: PT017 - both are right
        assert WEIGHTS in str(error).replace(INDEX, "")  # noqa: PT017
    else:
        assert loads_as(model, folder) == []


FOREIGN = (
    *("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"),
    *("policy-Q8_0.gguf", "tf_model.h5", "flax_model.msgpack"),
)


@pytest.mark.parametrize("file", FOREIGN)
def test_weights_in_another_format_are_refused_with_the_way_to_convert_them(file, model, base):
    (base / WEIGHTS).rename(base / file)
    refused(base, without(model, EMBED), file, "safetensors", "save_pretrained")


def test_weights_in_another_format_may_lie_beside_the_right_ones(model, base):
    torch.save({EMBED: torch.zeros(128, 128)}, base / "pytorch_model.bin")
    (base / "tf_model.h5").write_bytes(b"x")
    (base / "extra.pth").write_bytes(b"x")
    stale_shard(base)
    folder = publish(base, [without(model, EMBED)])
    assert loads_as(model, folder) == []
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def lacking_file(base: Path) -> str:
    sharded(base)
    (base / "weights-00002-of-00002.safetensors").unlink()
    return "weights-00002-of-00002.safetensors"


def lacking_tensor(base: Path) -> str:
    where = sharded(base, first="model")
    file = where[EMBED]
    edited = load_file(base / file)
    del edited[EMBED]
    save_file(edited, base / file)
    return f"{EMBED} {file}"


def truncated_shard(base: Path) -> str:
    file = sharded(base, first="model")[PROJ]
    (base / file).write_bytes((base / file).read_bytes()[:-100])
    return file


def truncated_file(base: Path) -> str:
    (base / WEIGHTS).write_bytes((base / WEIGHTS).read_bytes()[:-100])
    return WEIGHTS


def empty_file(base: Path) -> str:
    (base / WEIGHTS).write_bytes(b"")
    return WEIGHTS


def no_longer_fetched(base: Path) -> str:
    (base / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return WEIGHTS


def damaged_index(content: str, base: Path) -> str:
    sharded(base, first="model")
    (base / INDEX).write_text(content)
    return INDEX


def two_files(base: Path) -> str:
    sharded(base)
    (base / INDEX).unlink()
    return f"{INDEX} weights-00001-of-00002.safetensors weights-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    "damage",
    [
        *(lacking_file, lacking_tensor, truncated_shard, truncated_file, empty_file, no_longer_fetched),
        *(pytest.param(two_files, id="two_files_without_an_index"),),
        *(
            pytest.param(partial(damaged_index, content), id=f"index_{name}")
            for name, content in {
                "cut": '{"metadata": {}, "weight_',
                "empty": "",
                "list": "[]",
                "nested": "[" * 60_000,
                "without_map": '{"metadata": {}}',
                "map_is_a_list": '{"weight_map": ["model.safetensors"]}',
                "file_is_a_number": f'{{"weight_map": {{"{EMBED}": 3}}}}',
                "file_is_null": f'{{"weight_map": {{"{EMBED}": null}}}}',
            }.items()
        ),
    ],
)
def test_damaged_weights_are_refused_by_name_before_anything_is_published(damage, model, base):
    words = damage(base).split()
    refused(base, without(model, EMBED), *words)
    assert not list((base.parent / "bucket").rglob("*.json")), "the run has not begun"


@pytest.mark.parametrize("content", ["", "{", "[1]", "[" * 60_000], ids=["empty", "cut", "list", "nested"])
def test_a_damaged_config_is_refused_by_name(content, model, base):
    (base / "config.json").write_text(content)
    refused(base, model, "config.json of my-policy", "damaged", "download it again")


def test_a_base_without_weights_needs_every_parameter(model, base):
    (base / WEIGHTS).unlink()
    refused(base, without(model, NORM), NORM, "neither", "publish every parameter")
    assert stored(publish(base, [model])).keys() == dict(model.named_parameters()).keys()


@pytest.fixture
def on_hub(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a Hub that has the base as me/policy."""
    cache = base.parent / "cache"

    def names() -> list[str]:
        return [path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()]

    def snapshot_download(model: str, revision: str = "", **patterns: Any) -> str:
        assert model == "me/policy"
        assert revision in ("", cache.name)
        for name in filter_repo_objects(names(), **patterns):
            (cache / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base / name, cache / name)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda api, model: names())
    return cache


@pytest.mark.parametrize(
    "clutter", [stale_shard, stale_shard_beside_an_index, variant, variant_in_shards, names_of_their_own]
)
def test_of_a_model_on_the_hub_only_the_weights_that_count_are_downloaded(clutter, model, base, on_hub):
    needed = {*sharded(base).values()} if clutter is names_of_their_own else {WEIGHTS}
    if clutter is not names_of_their_own:
        clutter(base)
    fill(base, ["additional_chat_templates/tool_use.jinja", "optimizer.pt"])
    if clutter is stale_shard_beside_an_index:
        needed = {f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)}
    with Publisher(url_of(base), base="me/policy") as publisher:
        publisher.publish(without(model, EMBED))
    folder = newest(base)
    assert loads_as(model, folder) == []
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert {path.name for path in on_hub.glob("*.safetensors")} == needed
    assert not (on_hub / "optimizer.pt").exists()


@pytest.mark.parametrize("file", FOREIGN)
def test_a_model_on_the_hub_with_weights_in_another_format_is_refused(file, base, on_hub):
    (base / WEIGHTS).rename(base / file)
    with pytest.raises(CheckpointError, match=rf"me/policy has its weights in {file}.*save_pretrained"):
        Publisher(url_of(base), base="me/policy")
    assert not (on_hub / file).exists(), "it was not downloaded"


# Which dtype a tensor of a version has.

OTHERS = {
    "model.layers.0.mlp.gate.tid2eid": torch.arange(256, 512),
    "model.position_ids": torch.arange(1000, dtype=torch.int32),
    "model.steps": torch.tensor(16_777_217),
    "model.large": torch.tensor([-(2**62) - 1, 2**62 + 1]),
    "model.mask": torch.tensor([[True, False], [False, True]]),
    "model.flag": torch.tensor(True),
    "model.bytes": torch.arange(256, dtype=torch.uint8).reshape(16, 16),
    "model.signed": torch.arange(-128, 128, dtype=torch.int8),
    "model.short": torch.arange(-300, 300, dtype=torch.int16),
    "model.double": torch.tensor([math.pi, -1e300, 0.0, -0.0], dtype=torch.float64),
    "model.single": torch.tensor([[math.pi], [1e-42]], dtype=torch.float32),
    "model.unsigned": torch.tensor([2**31 + 7], dtype=torch.int64).to(torch.uint32),
    "model.none": torch.zeros(0, 3, dtype=torch.bfloat16),
}


def test_what_the_trainer_does_not_publish_keeps_dtype_and_bytes(model, base):
    edit(base, lambda tensors: tensors.update(OTHERS))
    for folder in (publish(base, [without(model)] * 2), newest(base, "again")):
        found = stored(folder)
        assert found.keys() == OTHERS.keys() | dict(model.named_parameters()).keys()
        assert [name for name, tensor in OTHERS.items() if not same_bits(tensor, found[name])] == []


@pytest.mark.parametrize("given", ["in float32", "in bf16", "not at all"])
def test_a_float32_tensor_of_a_bf16_checkpoint_stays_float32_bit_for_bit(given, model, base):
    wide = 1 + 1e-5 * torch.arange(len(model.model.norm.weight))
    edit(base, lambda tensors: tensors.update({NORM: wide}))
    rest = without(model, NORM)
    weights = {"in float32": {NORM: wide}, "in bf16": {NORM: wide.bfloat16()}, "not at all": {}}[given]
    found = stored(publish(base, [[*rest, *weights.items()]]))
    assert same_bits(found[NORM], wide.bfloat16().float() if given == "in bf16" else wide)
    assert {tensor.dtype for name, tensor in found.items() if name != NORM} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("of_base", "of_trainer", "expected"),
    [
        ("float32", "float32", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
        ("float16", "bfloat16", "bfloat16"),
        ("float16", "float32", "float16"),
        ("float16", "float16", "float16"),
        ("bfloat16", "float16", "float16"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_all_weights_of_a_version_have_one_16_bit_dtype(of_base, of_trainer, expected, tmp_path):
    """Also the frozen ones; integers stay as they are. Rounded masters are followed exactly, too."""
    steps = torch.arange(300, 600)
    kind = getattr(torch, expected)
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZE)).to(getattr(torch, of_base))
    base = edit(save(model, tmp_path / "base"), lambda tensors: tensors.update(steps=steps))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, of_trainer))

    def syncs() -> Iterator[Any]:
        yield without(model, EMBED)
        nudge(model.model.layers)
        yield without(model, EMBED)

    folder = publish(base, syncs())
    found = stored(folder)
    assert same_bits(found.pop("steps"), steps)
    assert [n for n, p in model.named_parameters() if not same_bits(found[n], p.to(kind))] == []
    assert config_of(folder)["dtype"] == expected
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == kind


@pytest.mark.parametrize(("first", "later"), [("bfloat16", "float16"), ("float16", "bfloat16")])
@pytest.mark.parametrize("same", [True, False], ids=["same trainer", "next trainer"])
def test_a_run_keeps_its_16_bit_dtype(first, later, same, model, base):
    """Numbers of the other one would be rounded, or taken for numbers of this one."""
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(contextlib.closing(Publisher(url_of(base), base)))
        publisher.publish(model.to(getattr(torch, first)))
        publisher.flush()
        before = stored(newest(base))
        if not same:
            publisher = stack.enter_context(contextlib.closing(Publisher(url_of(base), base)))
        sentence = "came as .* and now comes as" if same else "in the trainer, but .* in run 'run'"
        with pytest.raises((CheckpointError, CodecError), match=rf"model\.\S+ .*{sentence}"):
            publisher.publish(model.to(getattr(torch, later)))
    after = stored(newest(base))
    assert all(same_bits(tensor, after[name]) for name, tensor in before.items())


def flip(tensor: torch.Tensor, every: int) -> None:
    """Change the lowest bit of some elements, which no rounding to 16 bits keeps."""
    flat = tensor.detach().view(-1).view(torch.uint8)[:: tensor.element_size()]
    flat[::every] ^= 1


MOVING = {name.replace(".", "_"): tensor for name, tensor in OTHERS.items() if tensor.numel()} | {
    "model_half": torch.linspace(-5, 5, 33).half(),
    "model_wide": torch.linspace(1, 2, 700).view(7, 100),
    "model_scalar": torch.tensor(0.1),
}


def test_changes_of_tensors_of_every_dtype_are_followed_exactly(model, tmp_path, monkeypatch):
    """Over deltas, a jump and an anchor, by a follower and by one that comes late; also after a restart."""
    for name, tensor in MOVING.items():
        model.register_buffer(name, tensor.clone())
    base = save(model, tmp_path / "base")
    buffers = [model.get_buffer(name) for name in MOVING]
    assert stored(base)["model_wide"].dtype == torch.float32, "the base has what the test wants to be kept"

    def check(publisher: Publisher, late: str) -> None:
        assert publisher.digest(model) == publisher.flush().digest
        for folder in (newest(base), newest(base, late)):
            found = stored(folder)
            wrong = [n for n, t in model.state_dict().items() if not same_bits(found[n], t)]
            assert (found.keys(), wrong) == (model.state_dict().keys(), [])

    for life, given in enumerate((base, None)):
        with Publisher(url_of(base), base=given) as publisher:
            for number in range(10):
                for buffer in buffers:
                    flip(buffer, 1 + number % 3)
                flip(model.model.norm.weight, 5)
                publisher.publish(model)
                publisher.flush()
                assert publisher._outbox.shortcuts.idle(60)
                if number % 5 == 1:
                    check(publisher, f"late-{life}-{number}")
            monkeypatch.setattr(RunWriter, "anchor_is_due", lambda self: True)
            publisher.publish(model)
            publisher.flush()
            assert publisher._outbox.shortcuts.idle(60)
            publisher.publish(model)
            check(publisher, f"anchored-{life}")
            assert publisher.flush().anchor.version > 0
            assert publisher.flush().jumps or life
        monkeypatch.undo()


def test_a_state_with_tensors_of_every_dtype_is_restored(model, tmp_path):
    names = MOVING.keys() - {"model_unsigned"}  # which a state refuses by name
    for name in names:
        model.register_buffer(name, MOVING[name].clone())
    base = save(model, tmp_path / "base")
    optimizer = torch.optim.SGD(model.parameters())
    with Publisher(url_of(base), base=base) as publisher:
        for _ in range(2):
            publisher.publish(model)
            assert publisher.save_state(model, optimizer, final=True)
            publisher.flush()
            published = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            for name in names:
                flip(model.get_buffer(name), 2)
    nudge(model)
    with Publisher(url_of(base)) as publisher:
        publisher.restore(model, optimizer)
        publisher.publish(model)
        assert publisher.flush().changed == 0
    assert [name for name, t in model.state_dict().items() if not same_bits(t, published[name])] == []


@pytest.mark.parametrize("in_base", ["whole in float32", "float32", "bf16"])
@pytest.mark.parametrize("given", ["model", "parameters", "state_dict"])
def test_what_a_class_keeps_in_float32_is_published_in_float32(in_base, given, tmp_path):
    """A router's bias: with rounded values, tokens would go to other experts."""
    model = build("deepseek_v3")
    base = save(model.float() if in_base == "whole in float32" else model, tmp_path / "base")
    if in_base == "bf16":
        edit(base, lambda tensors: tensors.update({BIAS: tensors[BIAS].bfloat16()}))
    model = type(model).from_pretrained(base, dtype=torch.bfloat16)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32, "the class keeps it so"

    def syncs() -> Iterator[Any]:
        for number in range(3):
            yield GIVEN[given](model)
            if given != "parameters":  # which has no buffers
                flip(bias, 1 + number)
        yield GIVEN[given](model)

    folder = publish(base, syncs())
    assert loads_as(model, folder) == []
    if given != "parameters":
        assert same_bits(stored(folder)[BIAS], bias)


@pytest.mark.parametrize(
    ("in_base", "in_trainer", "word"),
    [
        (torch.bfloat16, torch.int64, "I64"),
        (torch.float32, torch.bool, "BOOL"),
        (torch.int64, torch.bfloat16, "I64"),
        (torch.int64, torch.float32, "I64"),
        (torch.int64, torch.int32, "I32"),
        (torch.bool, torch.bfloat16, "BOOL"),
        (torch.uint8, torch.bool, "U8"),
    ],
    ids=str,
)
def test_a_tensor_that_the_base_has_in_another_kind_of_dtype_is_refused(in_base, in_trainer, word, small):
    weights = stored(small)
    edit(small, lambda tensors: tensors.update(table=torch.ones(5).to(in_base)))
    refused(small, weights | {"table": torch.ones(5).to(in_trainer)}, "table", word)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("at", [0, 1], ids=["first", "later"])
def test_nan_and_infinity_are_refused_by_name_in_every_dtype_unless_allowed(dtype, value, at, small):
    weights = {"w": torch.ones(20, 8, dtype=torch.bfloat16), "gain": torch.ones(9, dtype=dtype)}
    save_file(weights, small / WEIGHTS)
    for allowed in (False, True):
        weights["gain"][4] = 1.0
        url = f"{url_of(small)}-{allowed}"
        publisher = Publisher(url, base=small, allow_nonfinite=allowed)
        with contextlib.closing(publisher):
            if at:
                publisher.publish(weights.items())
                publisher.flush()
            weights["gain"][4] = value
            if allowed:
                publisher.publish(weights.items())
                publisher.flush()
                (version,) = follow(url, into=small.parent / "followed", once=True)
                assert same_bits(stored(version.path)["gain"], weights["gain"])
                continue
            with pytest.raises(CodecError, match=r"gain .*NaN or inf.*allow_nonfinite"):
                publisher.publish(weights.items())
            found = open_run(url).newest()
            assert (found.version if found else -1) == at - 1


def test_a_master_that_is_too_large_for_float16_is_refused_by_name(tmp_path):
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZE)).half()
    base = save(model, tmp_path / "base")
    masters = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    masters.model.norm.weight.data[3] = 70_000.0
    refused(base, masters.named_parameters(), NORM, "allow_nonfinite", kind=CodecError)


def test_float32_tensors_of_a_bf16_trainer_are_rounded_with_a_warning(model, base, caplog):
    wide = torch.nn.Parameter(1 + 1e-5 * torch.arange(len(model.model.norm.weight)))
    publish(base, [[*without(model, NORM), (NORM, wide)]] * 2)
    said = [line for line in warnings_in(caplog).splitlines() if "rounded" in line]
    assert len(said) == 1, "once"
    assert NORM in said[0]
    assert "my-policy" in said[0]


def test_masters_in_float32_are_rounded_without_a_warning(base, caplog):
    publish(base, [AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)])
    assert "rounded" not in warnings_in(caplog)


# Buffers.


class Wrapper(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, model)


@pytest.fixture
def balanced(model: Any, tmp_path: Path) -> tuple[Any, Path]:
    """A model whose base has a buffer that training changes, and buffers that the base lacks."""
    for layer in model.model.layers:
        layer.mlp.register_buffer("load_bias", torch.zeros(8, dtype=torch.bfloat16))
    base = save(model, tmp_path / "my-policy")
    for layer in model.model.layers:
        layer.mlp.register_buffer("own_counter", torch.zeros(8, dtype=torch.int64))
        layer.mlp.register_buffer("scratch", torch.zeros(8), persistent=False)
    model.register_buffer("ema", torch.zeros(3))
    return model, base


@pytest.mark.parametrize("wrappers", [(), ("module",), ("_orig_mod",), ("_orig_mod", "module")], ids=str)
def test_a_model_is_published_with_those_buffers_that_the_base_has(wrappers, balanced):
    model, base = balanced
    whole = model
    for name in wrappers:  # DDP, torch.compile
        whole = Wrapper(whole, name)

    def syncs() -> Iterator[Any]:
        for number in range(3):
            for layer in model.model.layers:
                layer.mlp.load_bias += 0.5
                layer.mlp.own_counter += 1
                layer.mlp.scratch += number
            yield whole

    found = stored(publish(base, syncs()))
    assert found.keys() == stored(base).keys()
    assert [float(found[f"model.layers.{n}.mlp.load_bias"][0]) for n in (0, 1)] == [1.5, 1.5]


UNHELD = {
    "complex": torch.ones(4, dtype=torch.complex64),  # such as rotary embeddings
    "empty": torch.empty(0),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "meta": torch.empty(4, device="meta"),
}


@pytest.mark.parametrize("kind", UNHELD)
@pytest.mark.parametrize("persistent", [True, False], ids=["in the state dict", "not in the state dict"])
def test_a_buffer_that_the_base_lacks_may_be_one_that_no_version_can_hold(kind, persistent, model, base):
    model.model.register_buffer("own_buffer", UNHELD[kind], persistent=persistent)
    assert stored(publish(base, [model] * 2)).keys() == stored(base).keys()


def test_buffers_that_named_parameters_leaves_out_are_warned_of_by_name(balanced, caplog):
    model, base = balanced
    model.model.layers[0].mlp.load_bias += 0.5
    found = stored(publish(base, [model.named_parameters()]))
    assert float(found["model.layers.0.mlp.load_bias"][0]) == 0, "the base's"
    (said,) = [line for line in warnings_in(caplog).splitlines() if "load_bias" in line]
    assert "model.layers.0.mlp.load_bias, model.layers.1.mlp.load_bias" in said
    assert "buffer" in said
    assert "publish(model)" in said


def test_buffers_that_the_models_class_has_are_named_before_frozen_parameters(tmp_path, caplog):
    model = build("deepseek_v3")
    names = [name for name, _ in model.named_parameters()]
    publish(save(model, tmp_path / "base"), [without(model, *names[:5])])
    (said,) = [line for line in warnings_in(caplog).splitlines() if "untrained" in line]
    assert f"({BIAS}, " in said
    assert "publish(model)" in said


# The files next to the weights.

KEPT = (
    *("tekken.json", "sentencepiece.bpe.model", "params.json", "chat_template.jinja", "spiece.model"),
    *("vocab.txt", "merges.txt", "tokenizer.json", "preprocessor_config.json", "generation_config.json"),
    *("additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja", "LICENSE"),
)
LEFT = (
    *("optimizer.pt", "training_args.bin", "rng_state.pth", "trainer_state.json", "README.md", "extra.onnx"),
    *("onnx/model.onnx", "original/params.json", "checkpoint-500/config.json", ".gitattributes", "own.py"),
    *("runs/events.out.tfevents.1", "wandb/run-1/files/config.yaml", ".cache/hub/x.json", "logs/own.txt"),
)


def files_in(folder: Path) -> dict[str, str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    own = (WEIGHTS, "config.json", "delta_weight_sync.json")
    return {name: (folder / name).read_text() for name in names if name not in own}


@pytest.mark.parametrize("code", [False, True], ids=["no code", "trusted code"])
def test_everything_but_weights_is_in_each_version(code, model, base, monkeypatch):
    """In version 0, after a delta, and after a new anchor; for a follower, and for one that comes late."""
    (base / "generation_config.json").unlink()
    fill(base, (*KEPT, *LEFT))
    expected = {
        name: f"this is {name}" for name in KEPT + tuple(n for n in LEFT if n.endswith(".py") and code)
    }
    with Publisher(url_of(base), base=base, trust_remote_code=code) as publisher:
        for number in range(4):
            publisher.publish(without(model))
            publisher.flush()
            assert publisher._outbox.shortcuts.idle(60)
            assert files_in(newest(base)) == files_in(newest(base, f"late-{number}")) == expected
            nudge(model)
            monkeypatch.setattr(RunWriter, "anchor_is_due", lambda self: True)
        assert publisher.flush().anchor.version > 0


def test_a_file_whose_name_no_key_may_have_is_left_out_with_a_warning(model, base, caplog):
    folder = "additional_chat_templates"
    odd = ("chat template.jinja", f"{folder}/tool use (old).jinja", "vocab-größe.txt", "a+b.json")
    fill(base, (*odd, f"{folder}/plain.jinja"))
    found = files_in(publish(base, [without(model)]))
    assert found.keys() == {f"{folder}/plain.jinja", "generation_config.json"}
    assert [name for name in odd if name not in warnings_in(caplog)] == []


def test_a_signing_key_in_the_folder_of_the_base_is_not_published(model, base, caplog):
    public = make_keys(base / "keys")
    with Publisher(url_of(base), base=base, signing_key=base / "keys") as publisher:
        publisher.publish(without(model))
    (version,) = follow(url_of(base), into=base.parent / "followed", once=True, public_key=public)
    assert files_in(version.path).keys() == {"generation_config.json"}
    secret = (base / "keys").read_text().partition("=")[2].splitlines()[0].encode()
    bucket = [path for path in (base.parent / "bucket").rglob("*") if path.is_file()]
    assert not [path for path in bucket if secret in path.read_bytes()]
    assert "keys" in warnings_in(caplog)


def test_a_followed_version_may_be_the_base_of_the_next_run(model, base):
    """Its folder has a record of the version, which is not part of the checkpoint."""
    first = publish(base, [without(model)])
    url = f"{(base.parent / 'second').as_uri()}#run"
    with Publisher(url, base=first) as publisher:
        for number in range(3):
            publisher.publish(without(model, EMBED))
            manifest = publisher.flush()
            (version,) = follow(url, into=base.parent / "next", once=True)
            assert (version.version, version.digest) == (number, manifest.digest)
            nudge(model.model.layers)
    (again,) = follow(url, into=base.parent / "next", once=True)
    assert again.path == version.path, "the folder is found as it was left"


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_bucket_in_the_folder_of_the_base_is_no_part_of_it(restarts, model, base, tmp_path, monkeypatch):
    monkeypatch.setattr(RunWriter, "anchor_is_due", lambda self: True)
    url = f"{(base / 'bucket').as_uri()}#run"
    for _ in range(1 + restarts):
        with Publisher(url, base=base) as publisher:
            for _ in range(3):
                publisher.publish(without(model))
                publisher.flush()
                assert publisher._outbox.shortcuts.idle(60)
    manifest = open_run(url).manifest()
    assert restarts == 0 or manifest.anchor.version > 3
    assert {file.name for file in manifest.anchor.files} == {WEIGHTS, "config.json", "generation_config.json"}


CODE = {
    "configuration_my.py": """
from transformers import LlamaConfig


class MyConfig(LlamaConfig):
    model_type = "my_own_llama"
""",
    "modeling_my.py": """
from transformers import LlamaForCausalLM

from .configuration_my import MyConfig


class MyModel(LlamaForCausalLM):
    config_class = MyConfig
""",
}
AUTO = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyModel"}


@pytest.fixture
def own_code(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base whose model needs code of its own."""
    modules = base.parent / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    for name, text in CODE.items():
        (base / name).write_text(text)
    return configure(base, model_type="my_own_llama", auto_map=AUTO, architectures=["MyModel"])


def test_a_model_that_needs_its_own_code_is_refused_unless_the_code_is_trusted(own_code, model):
    refused(own_code, model.named_parameters(), "my-policy", "trust_remote_code=True")


@pytest.mark.parametrize("frozen", [(), (EMBED, NORM)], ids=["all trained", "some frozen"])
def test_a_version_of_a_model_with_trusted_code_of_its_own_loads(frozen, own_code):
    model = AutoModelForCausalLM.from_pretrained(own_code, trust_remote_code=True, dtype=torch.bfloat16)

    def syncs() -> Iterator[Any]:
        yield without(model, *frozen)
        nudge(model.model.layers)
        yield without(model, *frozen)

    folder = publish(own_code, syncs(), trust_remote_code=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    assert type(loaded).__name__ == "MyModel"
    state = loaded.state_dict()
    assert [n for n, t in model.state_dict().items() if not same_bits(t, state[n])] == []


def test_code_that_transformers_does_not_need_is_left_out_with_its_names(model, base, caplog):
    fill(base, CODE)
    configure(base, auto_map=AUTO)
    folder = publish(base, [without(model)])
    assert "auto_map" not in config_of(folder)
    assert loads_as(model, folder) == []
    assert [line for line in warnings_in(caplog).splitlines() if "auto_map" in line and "my-policy" in line]


@pytest.mark.parametrize(
    "file", ["tokenizer_config.json", "processor_config.json", "preprocessor_config.json"]
)
def test_no_file_of_a_version_names_code_that_it_lacks(file, model, base, caplog):
    """A tokenizer or a processor may have its own code, too."""
    fill(base, ["tokenization_my.py"])
    (base / file).write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_my.MyTokenizer", None]}})
    )
    try:
        folder = publish(base, [without(model)])
    except CheckpointError as error:
        assert "trust_remote_code" in str(error)  # noqa: PT017 - refusing such a base is right, too
    else:
        assert "auto_map" not in (folder / file).read_text()
        assert "trust_remote_code" in warnings_in(caplog)


# Quantized bases, of which the trainer has a dequantized copy.


def linear(tensors: Tensors) -> list[str]:
    return [name for name in tensors if name.endswith("_proj.weight")]


def to_fp8(tensors: Tensors) -> None:
    for name in linear(tensors):
        scale = tensors[name].float().abs().max() / 448
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)


def to_fp8_with_input_scales(tensors: Tensors) -> None:
    for name in linear(tensors):
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors |= {f"{name}_scale": torch.tensor(0.1), name.replace("weight", "input_scale"): torch.ones(())}


def to_int8(tensors: Tensors) -> None:
    for name in linear(tensors):
        tensors[name] = (tensors[name].float() * 100).to(torch.int8)
        tensors[f"{name}_scale"] = torch.full((len(tensors[name]), 1), 0.01, dtype=torch.bfloat16)


def to_nvfp4(tensors: Tensors) -> None:
    for name in linear(tensors):
        rows, columns = tensors[name].shape
        tensors[name] = torch.ones(rows, columns // 2, dtype=torch.uint8)
        tensors[f"{name}_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_2"] = torch.ones(())


def to_bitsandbytes(tensors: Tensors) -> None:
    for name in linear(tensors):
        tensors[name] = torch.zeros(tensors[name].numel() // 2, 1, dtype=torch.uint8)
        tensors[f"{name}.absmax"] = torch.ones(64)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(99, dtype=torch.uint8)


def to_packed(tensors: Tensors) -> None:
    for name in linear(tensors):
        rows, columns = tensors.pop(name).shape
        tensors[f"{name}_packed"] = torch.ones(rows, columns // 8, dtype=torch.int32)
        tensors[f"{name}_scale"] = torch.ones(rows, 1, dtype=torch.bfloat16)
        tensors[f"{name}_shape"] = torch.tensor([rows, columns])


def to_gptq(tensors: Tensors) -> None:
    for name in linear(tensors):
        rows, columns = tensors.pop(name).shape
        stem = name.removesuffix("weight")
        tensors[f"{stem}qweight"] = torch.ones(columns // 8, rows, dtype=torch.int32)
        tensors[f"{stem}qzeros"] = torch.ones(1, rows // 8, dtype=torch.int32)
        tensors[f"{stem}scales"] = torch.ones(1, rows, dtype=torch.float16)
        tensors[f"{stem}g_idx"] = torch.zeros(columns, dtype=torch.int32)


QUANTIZE = {
    "fp8": (to_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8-static": (to_fp8_with_input_scales, {"quant_method": "compressed-tensors"}),
    "int8": (to_int8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "nvfp4": (to_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "bitsandbytes": (to_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "packed": (to_packed, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "gptq": (to_gptq, {"quant_method": "gptq", "bits": 4}),
}


def quantized(base: Path, method: str) -> Path:
    change, config = QUANTIZE[method]
    return configure(edit(base, change), quantization_config=config)


@pytest.mark.parametrize(
    ("method", "frozen"),
    [*((method, (EMBED, NORM)) for method in QUANTIZE), ("fp8", ()), ("gptq", ())],
    ids=[*QUANTIZE, "fp8, all trained", "gptq, all trained"],
)
def test_a_version_of_a_quantized_base_has_the_dequantized_weights_only(method, frozen, model, base, caplog):
    quantized(base, method)

    def syncs() -> Iterator[Any]:
        yield without(model, *frozen)
        nudge(model.model.layers)
        yield without(model, *frozen)

    folder = publish(base, syncs())
    assert stored(folder).keys() == dict(model.named_parameters()).keys()
    assert "quantization_config" not in config_of(folder)
    assert loads_as(model, folder) == []
    assert "quantization_config" in warnings_in(caplog)


@pytest.mark.parametrize("method", QUANTIZE)
def test_a_quantized_tensor_that_was_not_published_is_refused_by_name(method, model, base):
    """The trainer's copy of it is dequantized, so the base cannot give it."""
    quantized(base, method)
    refused(base, without(model, PROJ), PROJ.removesuffix("weight"), "quantized", "dtype")


@pytest.mark.parametrize("method", QUANTIZE)
def test_a_vocabulary_that_was_resized_is_refused_of_a_quantized_base_too(method, model, base):
    quantized(base, method)
    model.resize_token_embeddings(136)
    refused(base, model, EMBED, "(136, ", "resized the vocabulary")


def to_mxfp4(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.zeros(experts, columns, rows // 32, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(experts, columns, rows // 32, dtype=torch.uint8)


@pytest.fixture
def gpt_oss(tmp_path: Path) -> tuple[Any, Path]:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZE, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    base = edit(save(model, tmp_path / "my-policy"), to_mxfp4)
    return model, configure(base, quantization_config={"quant_method": "mxfp4"})


def test_experts_that_the_base_has_in_mxfp4_are_published_as_the_trainer_has_them(gpt_oss):
    model, base = gpt_oss
    folder = publish(base, [model.named_parameters()])
    assert not [name for name in stored(folder) if name.endswith(("_blocks", "_scales"))]
    assert "quantization_config" not in config_of(folder)
    assert loads_as(model, folder) == []


def test_experts_in_mxfp4_that_were_not_published_are_refused_by_name(gpt_oss):
    model, base = gpt_oss
    frozen = "model.layers.1.mlp.experts.down_proj"
    refused(base, without(model, frozen), frozen, "quantized", "dtype")


@pytest.mark.parametrize("place", ["compression_config", "hf_quant_config.json"])
def test_no_file_of_a_version_says_that_it_is_quantized(place, model, base):
    """Engines look for this in several places."""
    edit(base, to_fp8)
    if place == "hf_quant_config.json":
        (base / place).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    else:
        configure(base, **{place: QUANTIZE["fp8"][1]})
    folder = publish(base, [model.named_parameters()])
    assert "quant" not in (folder / "config.json").read_text()
    assert not (folder / "hf_quant_config.json").exists()


def test_no_part_of_a_composite_config_says_that_a_version_is_quantized(tmp_path):
    model = llava()
    base = edit(save(model, tmp_path / "base"), to_fp8)
    text = config_of(base)["text_config"] | {"quantization_config": QUANTIZE["fp8"][1]}
    folder = publish(configure(base, text_config=text), [model.named_parameters()])
    assert "quant" not in (folder / "config.json").read_text()
    assert loads_as(model, folder) == []


# Is the head the embedding?

CLASSES = {
    "gemma": lambda: transformers.GemmaConfig(**{**SIZE, "tie_word_embeddings": True}, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=4),
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("copy", [True, False], ids=["stored copy", "no copy"])
def test_a_class_that_ties_by_default_needs_no_flag_in_the_config(name, copy, tmp_path):
    model = AutoModelForCausalLM.from_config(CLASSES[name]()).to(torch.bfloat16)
    base = save(model, tmp_path / "base")
    configure(base, tie_word_embeddings=None)
    if copy:
        head = model.get_input_embeddings().weight.detach().clone()
        edit(base, lambda tensors: tensors.update({HEAD: head}))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.get_input_embeddings().weight, "transformers ties it"

    def syncs() -> Iterator[Any]:
        yield model.named_parameters()
        nudge(model)
        yield model.named_parameters()

    folder = publish(base, syncs())
    assert HEAD not in stored(folder)
    assert loads_as(model, folder) == []


@pytest.fixture
def untied(model: Any, base: Path) -> tuple[Any, Path]:
    """A model with a head of its own, whose config says that the head is tied."""
    return model, configure(base, tie_word_embeddings=True)


@pytest.mark.parametrize("given", GIVEN)
def test_a_head_of_its_own_is_published_and_the_flag_corrected(given, untied):
    model, base = untied
    folder = publish(base, [GIVEN[given](model)] * 2)
    assert same_bits(stored(folder)[HEAD], model.lm_head.weight)
    assert config_of(folder)["tie_word_embeddings"] is False
    assert loads_as(model, folder) == []


@pytest.mark.parametrize("copied", [False, True], ids=["base has none", "base has a copy"])
def test_a_copy_of_the_tied_head_beside_the_embedding_is_refused(copied, tmp_path):
    model = AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**{**SIZE, "tie_word_embeddings": True})
    )
    base = save(model.to(torch.bfloat16), tmp_path / "base")
    head = model.lm_head.weight.detach().clone()
    if copied:
        edit(base, lambda tensors: tensors.update({HEAD: head}))
    refused(base, [*model.named_parameters(), (HEAD, head)], HEAD, "ties", EMBED)


@pytest.mark.parametrize("flag", [False, True, None])
def test_a_frozen_head_comes_from_the_base_whatever_the_flag_says(flag, base):
    """transformers does not tie tensors that a checkpoint has both, with different values."""
    configure(base, tie_word_embeddings=flag)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    assert same_bits(model.lm_head.weight, stored(base)[HEAD]), "transformers loads it"

    def syncs() -> Iterator[Any]:
        yield without(model, HEAD)
        nudge(model.model)
        yield without(model, HEAD)

    folder = publish(base, syncs())
    assert not config_of(folder).get("tie_word_embeddings")
    assert loads_as(model, folder) == []


def copy_embedding(base: Path) -> None:
    edit(base, lambda tensors: tensors.update({HEAD: tensors[EMBED].clone()}))


@pytest.mark.parametrize("given", ["model", "state_dict"])
@pytest.mark.parametrize(
    "head",
    [lambda base: None, copy_embedding, lambda base: (base / WEIGHTS).unlink()],
    ids=["another head", "an equal head", "no weights"],
)
def test_a_head_that_only_the_trainer_ties_is_published_beside_the_embedding(head, given, model, base):
    """The config of a version says untied, so a server does not tie them."""
    model.lm_head.weight = model.model.embed_tokens.weight
    head(base)

    def syncs() -> Iterator[Any]:
        yield GIVEN[given](model)
        nudge(model)
        yield GIVEN[given](model)

    assert loads_as(model, publish(base, syncs())) == []
    nudge(model)
    with Publisher(url_of(base), base) as second:
        second.publish(GIVEN[given](model))
        assert second.digest(GIVEN[given](model)) == second.flush().digest
        with pytest.raises(CodecError, match=rf"{HEAD} is tied to {EMBED}"):
            second.views(GIVEN[given](model))
    assert loads_as(model, newest(base)) == []


def test_a_trainer_that_ties_the_head_resumes(model, base):
    def tie(model: Any) -> tuple[Any, torch.optim.Optimizer]:
        model.lm_head.weight = model.model.embed_tokens.weight
        return model, torch.optim.SGD(model.parameters())

    with Publisher(url_of(base), base) as publisher:
        publisher.publish(tie(model)[0])
        nudge(model)
        publisher.publish(model)
        publisher.save_state(*tie(model))
        publisher.flush()
        nudge(model)
        publisher.publish(model)
    other = tie(build("llama", seed=1))
    with Publisher(url_of(base)) as resumed:
        resumed.restore(*other)
        nudge(other[0])
        resumed.publish(other[0])
        assert resumed.flush().version == 2, "it is the same sync again"
    assert loads_as(other[0], newest(base)) == []


@pytest.mark.parametrize("known", [True, False], ids=["named by a model", "named by a mapping"])
def test_two_tensors_of_the_base_that_are_one_of_the_trainer_are_both_published(known, tmp_path):
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3))).bfloat16()
    base = tmp_path / "my-policy"
    base.mkdir()
    (base / "config.json").write_text("{}")
    save_file(layers.state_dict(), base / WEIGHTS)
    layers[1].weight = layers[0].weight
    weights = layers if known else layers.state_dict()
    folder = publish(base, [weights])
    assert all(same_bits(stored(folder)[name], tensor) for name, tensor in layers.state_dict().items())


def llava() -> Any:
    torch.manual_seed(0)
    sight = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64}
    sight |= {"num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    text = SIZE | {"model_type": "llama"}
    config = transformers.LlavaConfig(text_config=text, vision_config=sight, image_token_id=127)
    return transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_the_outer_flag_of_a_composite_config_does_not_decide(frozen, tmp_path):
    model = llava()
    base = configure(save(model, tmp_path / "base"), tie_word_embeddings=True)
    folder = publish(base, [without(model, *[HEAD] * frozen)])
    assert loads_as(model, folder) == []


# What the trainer changed after it had loaded the checkpoint.


@pytest.mark.parametrize("rows", [136, 100], ids=["more", "fewer"])
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_a_vocabulary_that_the_trainer_resized_is_refused_with_what_to_do(name, rows, tmp_path):
    config = CLASSES[name]() if name in CLASSES else transformers.LlamaConfig(**SIZE)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    base = save(model, tmp_path / "my-policy")
    model.resize_token_embeddings(rows)
    refused(base, model.named_parameters(), "my-policy", f"({rows}, ", "resized the vocabulary", "tokenizer")


ADAPTED = {
    "lora": ("q_proj.base_layer.weight", "q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight"),
    "dora": ("q_proj.base_layer.weight", "q_proj.lora_magnitude_vector.default.weight"),
    "ia3": ("q_proj.base_layer.weight", "q_proj.ia3_l.default"),
    "modules_to_save": ("q_proj.original_module.weight", "q_proj.modules_to_save.default.weight"),
}


@pytest.mark.parametrize("method", ADAPTED)
def test_parameters_under_names_of_peft_are_refused_with_how_to_merge_them(method, model, base):
    """What `peft_model.get_base_model().named_parameters()` gives."""
    weights = [
        (f"{name.removesuffix('q_proj.weight')}{own}", parameter)
        for name, parameter in model.named_parameters()
        for own in (ADAPTED[method] if name.endswith("q_proj.weight") else [""])
    ]
    refused(base, weights, "PEFT", "merge", "q_proj", kind=ConfigError)


@pytest.mark.parametrize("wrapped", ["lora", "prompt"])
def test_the_state_of_a_model_of_peft_is_refused_with_what_to_publish(wrapped, model, base):
    configs = {
        "lora": LoraConfig(target_modules=["q_proj"]),
        "prompt": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    }
    adapted = get_peft_model(model, configs[wrapped])
    refused(base, adapted.state_dict(), "PEFT", "publish(model)", kind=ConfigError)


def test_without_transformers_names_count_that_are_the_checkpoints(model, base, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert stored(publish(base, [without(model, NORM)])).keys() == stored(base).keys()
    assert "transformers is not installed" in warnings_in(caplog)
