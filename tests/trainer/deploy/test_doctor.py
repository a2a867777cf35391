"""Each check of `doctor` fails for its planted fault and names the fix; and the keys of a deployment."""

import json
import re
import shutil
import stat
from collections import Counter
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session
from huggingface_hub.utils import get_session
from transformers import LlamaConfig

from delta_weight_sync import compat, gpu_build
from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, fingerprint, new_pair
from tests.trainer.deploy.conftest import OWNER, POLICY, World
from trainer.deploy import doctor as checks
from trainer.deploy.hub import connect


def has_disk(monkeypatch, free: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: usage)


@pytest.fixture(autouse=True)
def large_disk(monkeypatch):
    """Free bytes of this machine decide nothing."""
    has_disk(monkeypatch, 10**13)


def doctor(world: World, *options: str) -> dict[str, tuple[bool, str]]:
    """What each check said: whether all is well, and its text."""
    model = () if "--model" in options else ("--model", str(POLICY))
    status, out = world.run("doctor", *model, *options)
    lines = [line for line in out.splitlines() if line.startswith(("ok ", "PROBLEM"))]
    parts = [(line[:7].strip() == "ok", *line[9:].split(": ", 1)) for line in lines]
    found = {name: (ok, text) for ok, name, text in parts}
    assert status == (0 if all(ok for ok, _ in found.values()) else 1)
    return found


def problems(world: World, *options: str) -> dict[str, str]:
    return {name: text for name, (ok, text) in doctor(world, *options).items() if not ok}


def checkpoint(folder: Path, weights: int) -> str:
    """A checkpoint of this size, of which only the table of contents is there."""
    tensor = {"dtype": "BF16", "shape": [weights], "data_offsets": [0, 2 * weights]}
    header = json.dumps({"w": tensor}).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    size = {"vocab_size": 1024, "hidden_size": 1024, "intermediate_size": weights // 3072}
    LlamaConfig(num_hidden_layers=1, num_attention_heads=8, **size).save_pretrained(folder)
    return str(folder)


def test_all_is_well_before_a_deployment_of_the_owner_of_the_token(world: World):
    found = doctor(world, "--owner", "")
    assert found.keys() == checks.CHECKS.keys() - {"software for GPUs"}, "there are none"
    assert not [name for name, (ok, _) in found.items() if not ok], found
    assert f"may write for {OWNER}" in found["token"][1]
    assert "`up` makes it" in found["bucket"][1]


@pytest.mark.parametrize("fault", ["", "GET /api/(whoami-v2|spaces|models)"])
def test_each_fact_is_asked_for_once_though_many_checks_use_it(world: World, monkeypatch, fault):
    """Also a fact that cannot be had. `GET /api/whoami-v2` is for two tokens."""
    monkeypatch.setattr("trainer.memory.parts", lambda *_: {})  # it would ask the real Hub
    world.hub.add_model("lab/open", files={"config.json": "{}"})
    world.up()
    before = len(world.hub.requests())
    if fault:
        world.hub.fault(fault, status=403)
    found = problems(world, "--model", "lab/open")
    asked = Counter(request for request in world.hub.requests()[before:] if request.startswith("GET /api/"))
    assert asked.pop("GET /api/whoami-v2") == 2
    assert asked["GET /api/models/lab/open"] == 1
    assert set(asked.values()) == {1}
    in_vain = {"token", "Space's token", "plan", "model licence", "signatures", "disk", "GPU of the replicas"}
    assert found.keys() == (in_vain if fault else {"disk", "GPU of the replicas"})


def test_a_bucket_that_doctor_opens_keeps_the_time_limit_of_other_requests(world: World):
    connect()
    assert not problems(world)
    assert get_session().timeout.read == 60.0
    close_session()  # as huggingface_hub does after a connection failed
    assert get_session().timeout.read == 60.0


def test_all_is_well_with_a_deployment(world: World, api, monkeypatch):
    world.up("--public")
    monkeypatch.setenv("SPACE_HF_TOKEN", "")
    found = doctor(world)
    assert not [name for name, (ok, _) in found.items() if not ok], found
    assert "can be written and read" in found["bucket"][1]
    assert list(api.list_bucket_tree(f"{OWNER}/{world.name}", recursive=True)) == [], "the probe is deleted"


@pytest.mark.parametrize(
    ("token", "words", "space_token", "space_words"),
    [
        ("hf_team", "fine-grained", "hf_write", "may write"),
        ("", "HF_TOKEN is not set", "", "trainers open private Spaces"),
    ],
)
def test_unsuitable_or_missing_tokens(world, monkeypatch, tmp_path, token, words, space_token, space_words):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("SPACE_HF_TOKEN", space_token)
    assert space_words in problems(world)["Space's token"]
    monkeypatch.setenv("HF_TOKEN", token)
    assert words in problems(world)["token"]


def test_no_plan_and_no_money(world: World, monkeypatch):
    world.hub.add_account("modest", is_pro=False, can_pay=False)
    world.hub.add_token("hf_modestToken", user="modest")
    monkeypatch.setenv("HF_TOKEN", "hf_modestToken")
    assert "PRO" in problems(world, "--owner", "modest")["plan"]
    world.hub.add_account("modest", is_pro=True, can_pay=False)
    assert "billing" in problems(world, "--owner", "modest")["plan"]


def test_jobs_need_no_plan_but_the_right_to_start_them(world: World, monkeypatch):
    on_jobs = ("--on", "jobs", "--hardware", "cpu-basic")
    world.hub.add_account("modest", is_pro=False)
    world.hub.add_token("hf_modestToken", user="modest")
    monkeypatch.setenv("HF_TOKEN", "hf_modestToken")
    found = doctor(world, *on_jobs, "--owner", "modest")
    assert not [name for name, (ok, _) in found.items() if not ok], found
    assert "credits" in found["plan"][1]
    assert "$0.01 per hour" in found["plan"][1]
    monkeypatch.setenv("HF_TOKEN", "hf_team")
    assert "may not start Jobs for team" in problems(world, *on_jobs, "--owner", "team")["token"]
    assert "no hardware of Jobs" in problems(world, "--on", "jobs", "--hardware", "rtx-pro-6000x8")["plan"]
    assert "is no GPU of Spaces" in world.fails("doctor", "--hardware", "cpu-basic")


def test_a_bucket_that_may_be_read_only(world: World):
    world.up()
    world.hub.fault(f"POST /api/buckets/{OWNER}/{world.name}/batch", status=403)
    assert "write access" in problems(world)["bucket"]


def test_a_gated_model_whose_licence_was_not_accepted(world: World, monkeypatch):
    monkeypatch.setattr("trainer.memory.parts", lambda *_: {})  # it would ask the real Hub
    world.hub.add_model("lab/closed", gated="manual", files={"config.json": "{}"})
    found = problems(world, "--model", "lab/closed")["model licence"]
    assert "accept its licence" in found
    assert f"as {OWNER}" in found
    world.hub.add_model("lab/closed", gated="manual", granted=[OWNER], files={"config.json": "{}"})
    assert doctor(world, "--model", "lab/closed")["model licence"][0]
    assert "--model" in problems(world, "--model", "lab/no-such")["model licence"], "there is none"
    assert world.fails("doctor", "--config", "nope.yaml").startswith("deploy: [Errno 2]")


@pytest.mark.parametrize(("seconds", "word"), [(300, "behind"), (-300, "ahead")])
def test_a_clock_that_is_wrong(world: World, seconds, word):
    world.hub.skew(seconds)
    found = problems(world)
    assert found.keys() == {"clock"}
    assert word in found["clock"]
    assert "timedatectl" in found["clock"]


def test_a_trl_that_cannot_be_used(world: World, monkeypatch):
    monkeypatch.setattr(compat, "installed", lambda package: compat.Release("trl", ""))
    assert "trl is not installed: pip install" in problems(world)["versions"]


def test_a_full_disk(world: World, monkeypatch):
    has_disk(monkeypatch, 1000)
    found = problems(world)
    assert found.keys() == {"disk"}
    assert "TMPDIR" in found["disk"], "the model is a folder, so nothing is downloaded"


def test_a_trainer_needs_room_for_its_states(world: World, tmp_path, monkeypatch):
    """A state has twelve bytes for each weight, and is written to the folder for temporary files first."""
    model = checkpoint(tmp_path / "own", 10**8)
    has_disk(monkeypatch, 1_500_000_000)
    assert "TMPDIR" in problems(world, "--model", model)["disk"]
    has_disk(monkeypatch, 1_700_000_000)
    assert "disk" not in problems(world, "--model", model)


def test_a_model_that_is_too_large_for_the_replicas(world: World, tmp_path, monkeypatch):
    model = checkpoint(tmp_path / "large", 14 * 10**9)
    found = problems(world, "--model", model)
    assert found.keys() == {"GPU of the replicas"}
    assert "--hardware l40sx1" in found["GPU of the replicas"]
    assert not problems(world, "--model", model, "--hardware", "l40sx1")
    fits = checkpoint(tmp_path / "fits", 89 * 10**8)
    assert not problems(world, "--model", fits), "vLLM takes 0.92 of a GPU, not 0.9"
    huge = checkpoint(tmp_path / "huge", 10**12)
    assert "a smaller model" in problems(world, "--model", huge)["GPU of the replicas"]
    (Path(huge) / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    found = doctor(world, "--model", huge)
    assert (found["GPU of the replicas"][0], found["bucket"][0]) == (False, True), "the last check is run"


def test_a_model_that_is_too_large_for_the_trainer(world: World, tmp_path, monkeypatch):
    gpus = [24 * 10**9]
    monkeypatch.setattr(checks, "_gpu_bytes", lambda: gpus)
    small = checkpoint(tmp_path / "small", 6 * 10**8)
    large = checkpoint(tmp_path / "larger", 17 * 10**8)
    assert not problems(world, "--model", small)
    found = problems(world, "--model", large)
    assert found.keys() == {"GPU of the trainer"}
    assert re.search("weights 6.8, .* but there are 24 GB here: --mirror", found["GPU of the trainer"])
    gpus.append(gpus[0])
    assert "each of 2 GPUs needs" in doctor(world, "--model", large)["GPU of the trainer"][1]


def test_missing_software_for_a_gpu(world: World, monkeypatch):
    """PyTorch counts a GPU with an outdated driver, and raises when it is asked for more."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_build, "gpu_count", lambda: 1)
    monkeypatch.setattr(gpu_build, "problem", lambda: "the driver is old; install a newer one")
    monkeypatch.setattr(gpu_build, "missing", lambda: ["there is no compiler; install gcc"])
    sentences = "the driver is old; install a newer one; there is no compiler; install gcc"
    assert problems(world) == {"software for GPUs": sentences}
    for question, nothing in (("problem", ""), ("missing", [])):
        monkeypatch.setattr(gpu_build, question, lambda nothing=nothing: nothing)
    assert doctor(world)["software for GPUs"][0]


def file_of(world: World) -> Path:
    return Path(f".deploy/{OWNER}/{world.name}.env")


def lines(world: World) -> dict[str, str]:
    return dict(line.split("=") for line in file_of(world).read_text().splitlines())


def trusted(world: World, number: int = 1) -> str | None:
    return world.hub.space(world.replica(number))["variables"].get(PUBLIC_KEY)


def test_the_first_up_makes_keys_and_only_the_public_half_leaves(world: World):
    out = world.up("--replicas", "2")
    keys = lines(world)
    assert list(keys) == [SIGNING_KEY, PUBLIC_KEY]
    assert stat.S_IMODE(file_of(world).stat().st_mode) == 0o600
    assert trusted(world, 1) == trusted(world, 2) == keys[PUBLIC_KEY]
    assert PUBLIC_KEY not in world.hub.space(world.env)["variables"]
    assert f"replicas serve only versions that {fingerprint(keys[PUBLIC_KEY])} has signed" in out
    assert f"set -a; . .deploy/{OWNER}/env; . {file_of(world)}; set +a" in out
    for space in (world.env, world.replica(1)):
        assert keys[SIGNING_KEY] not in str(world.hub.space(space))
    world.name += "-b"
    world.up()
    assert trusted(world) != keys[PUBLIC_KEY], "each deployment has a key of its own"


def test_unsigned_removes_the_key_and_the_next_up_restores_it(world: World):
    world.up()
    key = trusted(world)
    out = world.up("--unsigned")
    assert "signatures   none" in out
    assert str(file_of(world)) not in out
    assert trusted(world) is None
    world.up("--unsigned")
    assert trusted(world) is None
    world.up()
    assert trusted(world) == key


def test_a_machine_without_the_key_does_not_replace_it(world: World):
    world.up()
    key = trusted(world)
    before = world.changes()
    file_of(world).rename("elsewhere.env")
    out = world.fails("up")
    assert f"the key's file {file_of(world)} is missing" in out
    assert fingerprint(key) in out
    assert world.changes() == before
    world.up("--unsigned")
    world.up()
    assert trusted(world) == lines(world)[PUBLIC_KEY] != key


def test_replicas_trust_both_keys_while_the_owner_changes_them(world: World):
    world.up()
    old = lines(world)
    new = new_pair()
    both = f"{new[PUBLIC_KEY]},{old[PUBLIC_KEY]}"
    file_of(world).write_text(f"{SIGNING_KEY}={new[SIGNING_KEY]}\n{PUBLIC_KEY}={both}\n")
    world.up()
    assert trusted(world) == both
    assert not problems(world)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{SIGNING_KEY}=ed25519_secret_{'z' * 64}\n", f"{SIGNING_KEY} is not a key"),
        ("", f"lacks {SIGNING_KEY} or {PUBLIC_KEY}"),
        ("{secret}\n" + f"{PUBLIC_KEY}=ed25519_public_{'1' * 64}\n", "would refuse what"),
        ("{secret}\n", f"lacks {SIGNING_KEY} or {PUBLIC_KEY}"),
    ],
)
def test_a_damaged_key_file_is_named_and_not_shown(world: World, text: str, said: str):
    file_of(world).parent.mkdir(parents=True)
    file_of(world).write_text(text.format(secret=f"{SIGNING_KEY}={new_pair()[SIGNING_KEY]}"))
    out = world.fails("up")
    assert said in out
    assert str(file_of(world)) in out
    assert "zzzz" not in out


def test_doctor_compares_the_keys_of_replicas_and_trainer(world: World, monkeypatch):
    unchecked = (True, "no replica checks signatures; `up` without --unsigned changes that")
    assert doctor(world)["signatures"] == (True, "there is no replica yet; `up` makes them check signatures")
    world.up()
    well = f"replicas trust {fingerprint(trusted(world))}, with which this machine signs"
    assert doctor(world)["signatures"] == (True, well)
    for name, word in new_pair().items():
        monkeypatch.setenv(name, word)
    assert f"{world.replica()} trusts {trusted(world)}" in problems(world)["signatures"]
    monkeypatch.setenv(SIGNING_KEY, "secret-of-another")
    said = problems(world)["signatures"]
    assert f"{SIGNING_KEY} is not a key" in said
    assert "another" not in said
    for name in (SIGNING_KEY, PUBLIC_KEY):
        monkeypatch.delenv(name)
    file_of(world).unlink()
    assert f"copy {file_of(world)}" in problems(world)["signatures"]
    world.up("--unsigned")
    assert doctor(world)["signatures"] == unchecked
