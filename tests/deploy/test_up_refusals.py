"""What `up` says when it cannot: each is a sentence with the fix, and nothing is half made."""

import pytest

from tests.deploy.conftest import READ, World


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", ["SPACE_HF_TOKEN is not set", "type Read"]),
        ("hf_write", ["SPACE_HF_TOKEN may write", "type Read"]),
        ("hf_team", ["SPACE_HF_TOKEN may write", "type Read"]),
        ("hf_expired", ["SPACE_HF_TOKEN", "does not know this token"]),
        ("hf_r\u00e9ad", ["SPACE_HF_TOKEN holds a letter that no token has"]),
    ],
)
def test_spaces_get_no_token_but_a_read_only_one(world: World, monkeypatch, token, words):
    monkeypatch.setenv("SPACE_HF_TOKEN", token)
    before = world.changes()
    out = world.fails("up")
    assert all(word in out for word in words), out
    assert world.changes() == before


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("hf_read", ["may not create anything for user", "type Write"]),
        ("hf_team", ["may not create anything for user", "type Write"]),
        ("hf_expired", ["does not know this token", "HF_TOKEN"]),
    ],
)
def test_a_token_that_may_not_write_is_refused_before_anything_is_made(
    world: World, monkeypatch, token, words
):
    monkeypatch.setenv("HF_TOKEN", token)
    before = world.changes()
    out = world.fails("up")
    assert all(word in out for word in words), out
    assert world.changes() == before


def test_a_fine_grained_read_token_will_do_for_the_spaces(world: World, monkeypatch):
    monkeypatch.setenv("SPACE_HF_TOKEN", "hf_bucket_read")
    world.up()


def test_an_account_without_a_plan_is_told_so(world: World, monkeypatch):
    world.hub.add_account("poor", is_pro=False, can_pay=False)
    world.hub.add_token("hf_poorOnesToken", user="poor")
    monkeypatch.setenv("HF_TOKEN", "hf_poorOnesToken")
    out = world.fails("up", "--owner", "poor")
    assert "paid plan" in out
    assert "hf_poorOnesToken" not in out


def test_no_answer_of_the_hub_is_one_sentence(world: World, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    out = world.fails("up")
    assert "gave no answer" in out
    assert "HF_ENDPOINT" in out
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("BUILD_ERROR", ["could not be built", "build log"]),
        ("RUNTIME_ERROR", ["ended right after its start", "run log"]),
        ("CONFIG_ERROR", ["configured", "build log"]),
    ],
)
def test_a_space_that_fails_shows_the_end_of_its_log_without_secrets(world: World, stage, words):
    world.up()
    world.hub.set_space(world.env, builds=["BUILDING", stage], error="it is broken", stage=stage)
    for kind in ("build", "run"):
        for number in range(40):
            world.hub.log(world.env, f"{kind} line {number}", kind)
        world.hub.log(world.env, f"token={READ} key={world.key()} other=hf_abcdefghij0123", kind)
    out = world.fails("resume")
    assert all(word in out for word in words), out
    assert "it is broken" in out
    assert "token=*** key=*** other=hf_***" in out
    assert "line 39" in out
    assert "line 3\n" not in out
