"""The commands after `up`: status, logs, pause, resume and down."""

import pytest
from huggingface_hub.errors import BucketNotFoundError

from tests.trainer.deploy.conftest import OWNER, READ, World


def rows(out: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:-1]}


def test_status_is_one_table_with_versions_and_costs(world: World):
    world.up("--replicas", "2")
    world.hub.set_space(world.replica(2), stage="SLEEPING")
    _, out = world.run("status")
    table = rows(out)
    assert table[world.env] == ["RUNNING", "cpu-basic", "-", "-", "0.00"]
    assert table[world.replica(1)] == ["RUNNING", "l4x1", "-", "-", "0.80"]
    assert table[world.replica(2)] == ["SLEEPING", "l4x1", "-", "-", "0.00"]
    assert "now $0.80 per hour; $1.60 while all of them run" in out
    assert world.hub.space(world.replica(2))["stage"] == "SLEEPING", "looking does not wake it"


def test_status_names_a_replica_that_does_not_answer(world: World):
    world.up()
    world.hub.set_space(world.replica(), host="http://127.0.0.1:9")
    world.apps = type(world.apps)(world.apps.env, "http://127.0.0.1:9")
    _, out = world.run("status")
    assert "no answer" in out


def test_logs_are_those_of_the_build_while_it_builds_and_of_the_app_afterwards(world: World):
    world.up()
    world.hub.log(world.replica(), f"the app wrote {READ}", "run")
    world.hub.log(world.replica(), "the image grows", "build")
    _, out = world.run("logs", "replica-1")
    assert "the app wrote ***" in out
    assert "the image grows" not in out
    world.hub.set_space(world.replica(), stage="BUILD_ERROR")
    _, out = world.run("logs", "replica-1")
    assert "the image grows" in out


def test_logs_of_an_unknown_space_list_the_known_ones(world: World):
    world.up()
    assert "there are env, replica-1" in world.fails("logs", "replica-7")


def test_pause_stops_what_costs_and_resume_starts_it_again(world: World):
    world.up()
    world.run("pause")
    assert {world.hub.space(name)["stage"] for name in (world.env, world.replica())} == {"PAUSED"}
    _, out = world.run("status")
    assert "now $0.00 per hour" in out
    status, out = world.run("resume")
    assert status == 0, out
    assert {world.hub.space(name)["stage"] for name in (world.env, world.replica())} == {"RUNNING"}


def test_down_leaves_nothing_but_the_bucket(world: World, api):
    world.up("--replicas", "2")
    _, out = world.run("down")
    left = [space.id for space in api.list_spaces(author=OWNER) if world.name in space.id]
    assert left == []
    assert api.bucket_info(f"{OWNER}/{world.name}").private
    assert "down --bucket" in out
    world.run("down", "--bucket")
    with pytest.raises(BucketNotFoundError):
        api.bucket_info(f"{OWNER}/{world.name}")


def test_down_touches_no_space_of_a_similar_name(world: World, api):
    world.up()
    for name in (f"{OWNER}/{world.name}-other", f"{OWNER}/my-{world.name}-env"):
        api.create_repo(name, repo_type="space", space_sdk="docker")
    world.run("down")
    left = {space.id for space in api.list_spaces(author=OWNER) if world.name in space.id}
    assert left == {f"{OWNER}/{world.name}-other", f"{OWNER}/my-{world.name}-env"}


@pytest.mark.parametrize("command", ["status", "pause", "resume"])
def test_without_spaces_a_command_says_how_to_get_them(world: World, command):
    assert "`up` makes them" in world.fails(command)
