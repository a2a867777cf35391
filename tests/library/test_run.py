"""`Run`: what a program that only reads gets, from one URL."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from delta_weight_sync import (
    CodecError,
    ConfigError,
    FolderError,
    NoVersionError,
    ObjectMissingError,
    ProtocolError,
    Publisher,
    Run,
    follow,
)
from tests.cli.command import command

START = {
    "w": torch.zeros(8, 4, dtype=torch.bfloat16),
    "scale": torch.ones(3, dtype=torch.float32),
    "steps": torch.zeros(2, dtype=torch.int64),
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run of three versions, with tensors of several dtypes."""
    base = tmp_path / "base"
    base.mkdir()
    save_file(START, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    url = f"{(tmp_path / 'bucket').as_uri()}#first"
    with Publisher(url, base) as publisher:
        weights = {name: tensor.clone() for name, tensor in START.items()}
        for version in range(3):
            if version:
                weights["w"][version, 1] = version
                weights["scale"][2] = 1 + version / 7
            publisher.publish(weights)
            publisher.flush()
    return url


def test_versions_are_listed_from_the_newest_and_named_by_number(url: str) -> None:
    run = Run(url)
    assert [manifest.version for manifest in run.versions()] == [2, 1, 0]
    assert run.manifest().version == 2
    assert run.manifest(1).digest == [*run.versions()][1].digest
    assert (run.name, run.url, repr(run)) == ("first", url, f"<Run {url}>")
    with pytest.raises(NoVersionError, match="has no version 3"):
        run.manifest(3)


def test_the_only_run_of_a_bucket_needs_no_name(url: str) -> None:
    bucket = url.partition("#")[0]
    assert Run(bucket).url == url
    assert Run(bucket, "first").url == url
    with pytest.raises(ConfigError, match="name one"):
        Run(url, "second")


def test_any_version_is_an_ordinary_checkpoint(url: str, tmp_path: Path) -> None:
    manifest = Run(url).checkout(tmp_path / "out", 1)
    assert manifest.version == 1
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["w"][1, 1] == 1
    assert weights["scale"].dtype == torch.float32
    assert (tmp_path / "out" / "config.json").exists()
    assert Run(url).checkout(str(tmp_path / "newest")).version == 2


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_checkout_changes_no_file_that_a_file_in_the_folder_is_a_link_to(
    url: str, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    out = tmp_path / "out"
    Run(url).checkout(out, 0)
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("model.safetensors", "config.json"):
        (out / name).rename(saved / name)
        link(saved / name, out / name)
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    Run(url).checkout(out, 2)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert load_file(out / "model.safetensors")["w"][2, 1] == 2


def test_a_checkout_that_failed_goes_on_and_another_model_stays(url: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(FolderError, match="other holds other files: name an empty folder, or a new one"):
        Run(url).checkout(other)
    assert [path.name for path in other.iterdir()] == ["model-00001-of-00002.safetensors"]
    bucket = Path(url.partition("#")[0].removeprefix("file://"))
    (delta,) = bucket.glob("runs/first/deltas/00000001*")
    delta.rename(tmp_path / "delta")
    with pytest.raises(ObjectMissingError):
        Run(url).checkout(tmp_path / "out", 1)
    (tmp_path / "delta").rename(delta)
    assert Run(url).checkout(tmp_path / "out", 1).version == 1


def test_a_file_is_no_folder_for_a_checkout(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"{out} is a file, or lies in one: name a folder"):
            Run(url).checkout(out)
        assert "name a folder" in command("checkout", url, "--out", out).complaint


def test_a_diff_names_each_element_that_changed(url: str) -> None:
    scale, matrix = Run(url).diff(0, 2)
    assert (matrix.name, matrix.dtype) == ("w", "BF16")
    assert matrix.positions.tolist() == [5, 9]
    values = torch.from_numpy(matrix.after).view(torch.bfloat16)
    assert values.tolist() == [1.0, 2.0]
    assert matrix.before.tolist() == [0, 0]
    assert (scale.name, scale.dtype, scale.positions.tolist()) == ("scale", "F32", [2])
    assert torch.from_numpy(scale.after).view(torch.float32).item() == np.float32(1 + 2 / 7)
    assert [*Run(url).diff(1, 1)] == []
    assert (matrix.shape, scale.shape) == ((8, 4), (3,))
    assert (matrix.largest_change, scale.largest_change) == (2.0, np.float32(1 + 2 / 7) - 1)


def test_two_runs_of_one_model_are_compared(url: str, tmp_path: Path) -> None:
    bucket = url.partition("#")[0]
    other = f"{bucket}#second"
    with Publisher(other, tmp_path / "base") as publisher:
        publisher.publish(START | {"scale": torch.full((3,), 3.0)})
    (scale, matrix) = Run(url).diff(2, 0, Run(other))
    assert (scale.positions.size, matrix.positions.size) == (3, 2)
    shown = command("diff", f"{url}@2", f"{other}@0")
    assert "5 weights of 37 differ, 13.514 %, in 2 of 3 tensors" in shown.output
    assert "scale [3]" in shown.output
    assert json.loads(command("diff", f"{url}@2", other, "--json").output)["largest"] == 2.0
    assert "0 weights of 37 differ" in command("diff", url, f"{url}@2").output
    save_file({"w": START["w"]}, tmp_path / "base" / "model.safetensors")
    with Publisher(f"{bucket}#third", tmp_path / "base") as publisher:
        publisher.publish({"w": START["w"]})
    with pytest.raises(CodecError, match="only in one of the two versions: compare runs of one model"):
        [*Run(url).diff(2, 0, Run(f"{bucket}#third"))]


def test_verify_yields_each_version_that_it_rebuilt_and_ends_at_damage(url: str, tmp_path: Path) -> None:
    assert [manifest.version for manifest in Run(url).verify()] == [0, 1, 2]
    (damaged,) = Run(url).manifest(2).delta
    path = tmp_path / "bucket" / damaged.key
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    versions = Run(url).verify()
    assert [next(versions).version for _ in range(2)] == [0, 1]
    with pytest.raises((ProtocolError, CodecError)):
        next(versions)


def test_a_run_can_be_followed(url: str, tmp_path: Path) -> None:
    (version,) = follow(Run(url), tmp_path / "policy", once=True)
    assert version.version == 2
    with pytest.raises(ConfigError, match="pass the key to `Run`"):
        follow(Run(url), tmp_path / "policy", public_key="ed25519_public_" + "0" * 64)
