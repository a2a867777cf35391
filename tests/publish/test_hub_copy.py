"""Version 0 of a base on the Hub is not uploaded if it equals the base; otherwise, it is uploaded."""

import itertools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file, save_file

from delta_weight_sync import Publisher, follow
from delta_weight_sync.checkpoint import INDEX, dtype_of, to_bits
from delta_weight_sync.digest import state_digest, to_hex
from delta_weight_sync.publish.base import Base
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.reader import open_run
from delta_weight_sync.records import Manifest
from delta_weight_sync.runlog import RunLogReader
from delta_weight_sync.store import hub as hub_bucket
from tests import forked
from tests.support.hubsim import HubSim
from tests.support.models import CONFIGS, build, save

Tensors = dict[str, torch.Tensor]
LITTLE = 1_000_000  # bytes; nobody would notice the wait for this upload
ROWS = 512  # of a tensor with 2048 columns
SEEDS = itertools.count()
UPLOAD = """
import sys
from huggingface_hub import HfApi
HfApi().create_repo(sys.argv[1])
HfApi().upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2])
"""


def client_of(url: str, home: Path) -> dict[str, object]:
    """The constants that huggingface_hub would take from its environment if it were imported now."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    cache = str(home / "hub")
    return {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": cache}


@pytest.fixture
def client(hub: HubSim, hub_env: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in client_of(hub.url, tmp_path / "home").items():
        monkeypatch.setattr(constants, name, value)


def weights(rows: int = ROWS) -> Tensors:
    """Other weights at each call: the client does not upload what the storage has from another test."""
    draw = torch.Generator().manual_seed(next(SEEDS))
    names = ("embed.weight", "layers.0.weight", "layers.1.weight", "norm.weight")
    shapes = [(rows, 2048)] * 3 + [(2048,)]
    return {
        name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1, generator=draw)
        for name, shape in zip(names, shapes, strict=True)
    }


def write(folder: Path, tensors: Tensors, shards: int = 1) -> Path:
    """A checkpoint of a model that transformers does not know."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        some = dict([*tensors.items()][number::shards])
        save_file(some, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    return folder


def push(hub: HubSim, folder: Path) -> str:
    """Make a model on the Hub of a folder, from another machine: the trainer's client must not know of it."""
    name = f"team/{uuid4().hex}"
    own = os.environ | hub.env(folder.parent / "owner")
    subprocess.run([sys.executable, "-c", UPLOAD, name, str(folder)], env=own, check=True)
    return name


@dataclass
class Published:
    """What came of a trainer's first sync."""

    url: str
    manifest: Manifest
    received: int  # bytes that the Hub's storage received
    sent: int  # bytes that the trainer sent, as its log says


Publish = Callable[..., Published]


def received_during(hub: HubSim, url: str, work: Callable[[], object]) -> Published:
    before = hub.received()
    work()
    received = hub.received() - before
    reader = open_run(url)
    sent = [event.sent for event in RunLogReader(reader.bucket, "run").poll() if event.kind == "traffic"]
    return Published(url, reader.manifest(0), received, sum(sent[0].values()))


@pytest.fixture
def publish(hub: HubSim, client: None) -> Publish:
    """Publishes `tensors` as the first sync. `then` is called between opening the run and this sync."""

    def run(
        model: str | Path, tensors: Tensors, bucket: str = "", then: Callable[[], object] = lambda: None
    ) -> Published:
        url = f"{bucket or f'hf://buckets/team/{uuid4().hex}/runs'}#run"

        def train() -> None:
            with Publisher(url, base=model) as publisher:
                then()
                publisher.publish(tensors)

        return received_during(hub, url, train)

    return run


def check(published: Published, tensors: Tensors, into: Path) -> Path:
    """A reader, which compares every sha256 and the digest, gets exactly these tensors."""
    (version,) = follow(published.url, into=into, once=True)
    assert version.version == 0
    found = {name: t for path in version.path.glob("*.safetensors") for name, t in load_file(path).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name].to(found[name].dtype)) for name in tensors)
    digest = state_digest({name: to_bits(tensor, dtype_of(tensor)) for name, tensor in found.items()})
    assert published.manifest.digest == to_hex(digest)
    return version.path


def nbytes(tensors: Tensors) -> int:
    return sum(2 * tensor.numel() for tensor in tensors.values())


def is_copied(published: Published, tensors: Tensors) -> bool:
    """Whether no weights were uploaded: as the storage, and as the trainer counts."""
    assert nbytes(tensors) > 4 * LITTLE
    few = {published.received < LITTLE, published.sent < LITTLE}
    many = {published.received > nbytes(tensors) / 2, published.sent > nbytes(tensors)}
    assert few != many
    return few == {True}


@pytest.mark.parametrize(
    ("rows", "shards"),
    [(ROWS, 1), (ROWS, 3), pytest.param(100_000, 1, marks=pytest.mark.long)],
    ids=["6 MB", "3 files", "1.2 GB"],
)
def test_no_weight_is_uploaded_if_version_0_is_the_base(hub, publish, tmp_path, rows, shards):
    tensors = weights(rows)
    base = write(tmp_path / "base", tensors, shards)
    published = publish(push(hub, base), tensors)
    assert is_copied(published, tensors)
    refs = {ref.name: ref for ref in published.manifest.anchor.files}
    assert refs.keys() == {path.name for path in base.iterdir()}
    same = [path for path in base.iterdir() if path.name != "config.json"]
    assert all(refs[path.name].is_in(path) for path in same), "sizes and sha256 are those of the base's files"
    folder = check(published, tensors, tmp_path / "followed")
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in same)


def test_weights_that_are_not_trained_do_not_matter(hub, publish, tmp_path):
    tensors = weights()
    model = push(hub, write(tmp_path / "base", tensors))
    trained = {name: tensor for name, tensor in tensors.items() if name != "layers.0.weight"}
    published = publish(model, trained)
    assert is_copied(published, tensors)
    check(published, tensors, tmp_path / "followed")


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers_are_copied(hub, client, tmp_path, caplog, name):
    """Also those whose parameters have other names and shapes than the checkpoint, or other dtypes."""
    model = build(name)
    base = push(hub, save(model, tmp_path / "base"))
    url = f"hf://buckets/team/{uuid4().hex}#run"
    with caplog.at_level(logging.INFO, "delta_weight_sync"), Publisher(url, base=base) as publisher:
        publisher.publish(model)
    assert not [line for line in caplog.messages if "uploaded" in line]
    (weights,) = open_run(url).manifest(0).anchor.weights
    assert weights.is_in(tmp_path / "base" / "model.safetensors")


# Uploaded.


@dataclass
class Scene:
    """A trainer that is about to open a run. Its base has two files."""

    hub: HubSim
    patch: pytest.MonkeyPatch
    model: str | Path
    tensors: Tensors
    bucket: str = ""
    then: Callable[[], object] = lambda: None


def one_weight_differs(scene: Scene) -> None:
    scene.tensors["layers.1.weight"][-1, -1] += 1


def the_trainer_has_float16(scene: Scene) -> None:
    scene.tensors = {name: tensor.half() for name, tensor in scene.tensors.items()}


def the_base_is_a_folder(scene: Scene) -> None:
    scene.model = Path(HfApi().snapshot_download(scene.model))


def the_bucket_is_a_folder(scene: Scene) -> None:
    scene.bucket = f"file://{constants.HF_HUB_CACHE}/bucket"


def the_model_is_gone(scene: Scene) -> None:
    scene.then = partial(scene.hub.fault, "POST .*/paths-info/", status=404)


def the_model_is_not_in_the_xet_storage(scene: Scene) -> None:
    post = hub_bucket.http_backoff

    def without_hashes(*arguments: Any, **options: Any) -> Any:
        answer = post(*arguments, **options)
        return SimpleNamespace(json=lambda: [{**file, "xetHash": None} for file in answer.json()])

    scene.patch.setattr(hub_bucket, "http_backoff", without_hashes)
    scene.patch.setattr(hub_bucket, "hf_raise_for_status", lambda answer: None)


def the_local_copy_is_another_file(scene: Scene) -> None:
    """It has the same tensors, and another header."""

    def rewrite() -> None:
        (file,) = Path(constants.HF_HUB_CACHE).glob("**/model-00002-of-00002.safetensors")
        tensors = load_file(file)
        file.unlink()
        save_file(tensors, file, metadata={"format": "pt", "note": "not the base's"})

    scene.then = rewrite


def the_hub_refuses(scene: Scene) -> None:
    """As it does for a bucket in another region: nothing is copied."""
    scene.then = partial(scene.hub.fault, "POST .*/batch", times=1, status=403)


def the_hub_copies_one_file_only(scene: Scene) -> None:
    batch = HfApi.batch_bucket_files

    def some(api: HfApi, bucket: str, *, copy: Any = None, **options: Any) -> None:
        batch(api, bucket, copy=copy[:1] if copy else None, **options)

    scene.patch.setattr(HfApi, "batch_bucket_files", some)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (one_weight_differs, "layers.1.weight has other values than in team/"),
        (the_trainer_has_float16, "embed.weight is F16 .* in version 0, but BF16 .* in team/"),
        (the_base_is_a_folder, "is a folder of this machine"),
        (the_bucket_is_a_folder, "file:///.* is not on the Hub"),
        (the_model_is_gone, "the Hub did not describe the files of team/.*404"),
        (the_model_is_not_in_the_xet_storage, "of team/.* is not in the Hub's Xet storage"),
        (the_local_copy_is_another_file, "model-00002-of-00002.safetensors is not the file that team/.* has"),
        (the_hub_refuses, "the Hub did not copy the files of team/.*403"),
        (the_hub_copies_one_file_only, "the Hub stored another .*model-00002-of-00002.safetensors than"),
    ],
)
def test_otherwise_it_is_uploaded(hub, publish, tmp_path, monkeypatch, caplog, prepare, why):
    tensors = weights()
    scene = Scene(hub, monkeypatch, push(hub, write(tmp_path / "base", tensors, 2)), tensors)
    prepare(scene)
    with caplog.at_level(logging.INFO, "delta_weight_sync"):
        published = publish(scene.model, scene.tensors, scene.bucket, scene.then)
    (said,) = (line for line in caplog.messages if "version 0 is uploaded" in line)
    assert re.search(why, said), said
    if scene.bucket:
        assert published.sent > nbytes(tensors)
    else:
        assert not is_copied(published, tensors)
    check(published, scene.tensors, tmp_path / "followed")
    refs = published.manifest.anchor.files
    assert [ref.name for ref in published.manifest.anchor.weights] == ["model.safetensors"]
    left = open_run(published.url).bucket.list("runs/run/anchors/")
    assert {info.key for info in left} == {ref.key for ref in refs}, "nothing is left of a copy"


def is_float32(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in tensors.items()}, base / "model.safetensors")


def is_not_aligned(base: Path) -> None:
    content = (base / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = (end - 7).to_bytes(8, "little") + content[8:end] + b" "
    (base / "model.safetensors").write_bytes(header + content[end:])


def has_the_tied_head_twice(base: Path) -> None:
    (base / "config.json").write_text('{"tie_word_embeddings": true}')
    tensors = load_file(base / "model.safetensors")
    head = {"lm_head.weight": tensors["embed.weight"].clone()}
    save_file(tensors | head, base / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (is_float32, "embed.weight is BF16 .* in version 0, but F32"),
        (is_not_aligned, "the tensors in model.safetensors of .* are not aligned"),
        (has_the_tied_head_twice, "lm_head.weight is only in one of version 0 and team/"),
    ],
)
def test_a_base_that_is_no_version_is_uploaded(hub, publish, tmp_path, caplog, change, why):
    tensors = weights()
    change(base := write(tmp_path / "base", tensors))
    with caplog.at_level(logging.INFO, "delta_weight_sync"):
        published = publish(push(hub, base), tensors)
    assert re.search(f"version 0 is uploaded, not copied from the base: .*{why}", caplog.text)
    assert not is_copied(published, tensors)
    check(published, tensors, tmp_path / "followed")


# Later.


def test_a_run_goes_on_after_a_copy(hub, client, tmp_path, monkeypatch):
    """With deltas to the copied files, and with an anchor in the trainer's own files. Then it resumes."""
    tensors = weights()
    model = push(hub, write(tmp_path / "base", tensors, 3))
    url = f"hf://buckets/team/{uuid4().hex}#run"
    with Publisher(url, base=model) as publisher, monkeypatch.context() as patch:
        for step in range(4):
            tensors["norm.weight"][step] += step
            patch.setattr(RunWriter, "anchor_is_due", lambda self, step=step: step == 1)
            publisher.publish(tensors)
            publisher.flush()
            if step in (1, 3):
                assert publisher._outbox.shortcuts.idle(60)
    with Publisher(url) as publisher:
        tensors["norm.weight"][9] = 0.25
        publisher.publish(tensors)
    run = open_run(url)
    layouts = {m.version: [ref.name for ref in m.anchor.weights] for m in run.versions()}
    assert [len(layouts[0]), layouts[4]] == [3, ["model.safetensors"]]
    for version in (1, 4):
        run.checkout(run.manifest(version), tmp_path / "version")
    found = {
        name: t
        for path in (tmp_path / "version").glob("*.safetensors")
        for name, t in load_file(path).items()
    }
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def publish_together(rank: int, folder: Path, url: str, model: str, hub_url: str) -> None:
    """Each rank has the model whole, as with DDP, and publishes its share."""
    for name, value in client_of(hub_url, folder / "home").items():
        setattr(constants, name, value)
    tensors = load_file(folder / "weights")
    with Publisher(url, base=model) as publisher:
        publisher.publish(tensors)
        assert publisher.flush().version == 0


@pytest.mark.parametrize(
    "differs", [pytest.param(False, id="the base"), pytest.param(True, id="one weight differs")]
)
@pytest.mark.long
def test_several_ranks(hub, client, tmp_path, differs):
    tensors = weights()
    model = push(hub, write(tmp_path / "base", tensors, 2))
    if differs:
        tensors["layers.0.weight"][0, 0] = 2.0  # the second tensor, which rank 1 owns
    save_file(tensors, tmp_path / "weights")
    url = f"hf://buckets/team/{uuid4().hex}#run"

    def train() -> None:
        assert forked.ranks(publish_together, 2, tmp_path, url, model, hub.url) == [0, 0]

    published = received_during(hub, url, train)
    assert is_copied(published, tensors) != differs
    check(published, tensors, tmp_path / "followed")


def test_a_base_that_changes_while_it_is_downloaded_is_of_one_revision(client, hub, tmp_path):
    before = weights(rows=8)
    after = weights(rows=8)
    name = push(hub, write(tmp_path / "before", before))
    base = Base(name)
    write(tmp_path / "after", after)
    HfApi().upload_folder(repo_id=name, folder_path=tmp_path / "after")
    assert base.checkpoint
    assert base.folder.name != HfApi().model_info(name).sha
    assert torch.equal(load_file(base.folder / "model.safetensors")["norm.weight"], before["norm.weight"])
