"""The signing keys of a deployment: made by `up`, removed by --unsigned, and the secret half stays here."""

import stat
from pathlib import Path

import pytest

from delta_weight_sync.signing import PUBLIC_KEY, SIGNING_KEY, fingerprint, new_pair
from tests.trainer.deploy.conftest import OWNER, World
from tests.trainer.deploy.test_doctor import doctor, problems


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


def test_each_deployment_of_an_owner_has_a_key_of_its_own(world: World):
    world.up()
    first = trusted(world)
    world.name += "-b"
    world.up()
    assert first != trusted(world)


def test_unsigned_removes_the_key_and_the_next_up_restores_it(world: World):
    world.up()
    key = trusted(world)
    out = world.up("--unsigned")
    assert f"remove {PUBLIC_KEY} from {world.replica()}" in out
    assert "signatures   none" in out
    assert str(file_of(world)) not in out
    assert trusted(world) is None
    assert world.up("--unsigned").startswith("nothing to change")
    world.up()
    assert trusted(world) == key


def test_a_dry_run_makes_no_key(world: World):
    world.up("--dry-run", "dry")
    assert not file_of(world).exists()
    assert f'"{PUBLIC_KEY}": "made by the first `up`"' in Path("dry/plan.json").read_text()
    world.up("--dry-run", "unsigned", "--unsigned")
    assert PUBLIC_KEY not in Path("unsigned/plan.json").read_text()


def test_a_machine_without_the_key_does_not_replace_it(world: World):
    world.up()
    key, before = trusted(world), world.changes()
    file_of(world).rename("elsewhere.env")
    out = world.fails("up")
    assert f"whose file {file_of(world)} is not here" in out
    assert fingerprint(key) in out
    assert world.changes() == before
    world.up("--unsigned")
    world.up()
    assert trusted(world) == lines(world)[PUBLIC_KEY] != key


def test_replicas_trust_both_keys_while_the_owner_changes_them(world: World):
    world.up()
    old, new = lines(world), new_pair()
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
    world.up()
    secret = file_of(world).read_text().splitlines()[0]
    file_of(world).write_text(text.format(secret=secret))
    out = world.fails("up")
    assert said in out
    assert str(file_of(world)) in out
    assert "zzzz" not in out


def test_doctor_compares_the_keys_of_replicas_and_trainer(world: World, monkeypatch):
    assert doctor(world)["signatures"] == (True, "`up` makes keys")
    world.up()
    assert doctor(world)["signatures"] == (
        True,
        f"replicas trust {fingerprint(trusted(world))}, which signs on this machine",
    )
    for name, word in new_pair().items():
        monkeypatch.setenv(name, word)
    assert f"{world.replica()} trusts {trusted(world)}" in problems(world)["signatures"]
    monkeypatch.setenv(SIGNING_KEY, "secret-of-another")
    said = problems(world)["signatures"]
    assert f"{SIGNING_KEY} is not a key" in said
    assert "another" not in said


def test_doctor_reports_a_missing_key_file(world: World):
    world.up()
    file_of(world).unlink()
    assert f"copy {file_of(world)}" in problems(world)["signatures"]
    world.up("--unsigned")
    assert "replicas check none" in doctor(world)["signatures"][1]
