"""`up` does what the dry run wrote and explains each refusal with its fix; and the commands after it."""

import json
import os
import re
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import BucketNotFoundError

from delta_weight_sync.signing import PUBLIC_KEY
from tests.support.published_run import write_run
from tests.trainer.deploy.conftest import OWNER, READ, World
from trainer.deploy import DeployError
from trainer.deploy.plan import CHECKOUT, NO_KEY_YET, make_plan

KIND = "ed25519_public_"


def read_folder(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_up_makes_exactly_what_the_dry_run_wrote(world: World):
    options = ("--replicas", "2", "--hardware", "l4x4", "--run", "one")
    world.up("--dry-run", "dry", *options)
    plan = json.loads(Path("dry/plan.json").read_text())
    follows = {"REPLICA_BUCKET": f"hf://buckets/{OWNER}/{world.name}", "REPLICA_RUN": "one"}
    follows |= {"REPLICA_NAME": "replica-2", "REPLICA_VLLM_ARGS": "--tensor-parallel-size 4"}
    assert plan["spaces"][2]["variables"].items() >= follows.items()
    out = world.up(*options)
    values = {"HF_TOKEN": READ, "REPLICA_KEY": world.key(), "WORDLE_KEY": world.key()}
    for wanted in plan["spaces"]:
        made = world.hub.space(wanted["repo_id"])
        made["files"].pop(".gitattributes")  # the Hub's own
        assert made["files"] == read_folder(Path("dry", wanted["folder"]))
        for key in {PUBLIC_KEY} & wanted["variables"].keys():  # a dry run makes none
            assert (wanted["variables"].pop(key), made["variables"].pop(key)[:15]) == (NO_KEY_YET, KIND)
        assert made["variables"] == wanted["variables"]
        assert made["secrets"] == {name: values[name] for name in wanted["secrets"]}
        assert made["requested"] == wanted["hardware"]
        assert made["sleep_time"] == wanted["sleep_s"]
        assert made["visibility"] == "private"
        assert made["stage"] == "RUNNING"
    assert f"bucket       {plan['bucket']}" in out


def test_up_ends_with_urls_the_trainer_s_command_and_the_cost(world: World):
    """An outdated state on the Hub is not a failure."""
    builds = ["NO_APP_FILE", "BUILD_ERROR", "BUILDING", "APP_STARTING", "RUNNING"]
    world.hub.set_space(world.env, builds=builds)
    out = world.up("--replicas", "2")
    assert f"{world.env}: healthy" in out
    progress = [out.index(f"{world.replica()}: {stage}") for stage in ("APP_STARTING", "waiting for the run")]
    assert progress == sorted(progress)
    assert f"environment  {world.apps.env}" in out
    assert "$1.60 per hour" in out
    assert "$0.00 while they sleep" in out
    command = out[out.index("set -a") :]
    assert f". .deploy/{OWNER}/env" in command
    assert f"--bucket hf://buckets/{OWNER}/{world.name} --run first" in command
    assert f"--replicas {world.apps.replica} {world.apps.replica}" in command
    assert f'export SPACES="{world.apps.env} {world.apps.replica} {world.apps.replica}"' in command
    assert Path(__file__).parents[3].joinpath("trainer/configs/qwen3_0_6b.yaml").is_file()
    assert "trainer/configs/qwen3_0_6b.yaml" in command


REFUSED = {"state": "starting", "error": "the Hub refused read access"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (REFUSED, "starting (the Hub refused read access)"),
        ({"state": "not set up"}, "its page says which variable or secret it lacks"),
    ],
)
def test_a_replica_that_reports_an_error_ends_the_wait(world: World, server, answer, words):
    with server({"/ready": answer}) as url:
        world.apps = type(world.apps)(world.apps.env, url)
        out = world.fails("up")
    assert f"{world.replica()} did not become ready" in out
    assert words in out


def test_a_second_up_changes_nothing_but_what_its_options_say(world: World, api, monkeypatch):
    """A variable that the owner added stays."""
    world.up()
    api.add_space_variable(world.replica(), "REPLICA_MAX_NUM_SEQS", "128")
    settings = ("files", "commits", "variables", "secrets", "requested", "sleep_time", "visibility")

    def made() -> dict[str, dict]:
        spaces = {name: world.hub.space(name) for name in (world.env, world.replica())}
        return {name: {key: space[key] for key in settings} for name, space in spaces.items()}

    expected = made()
    world.up()
    assert made() == expected
    world.hub.add_token("hf_anotherReadToken", user=OWNER, role="read")
    monkeypatch.setenv("SPACE_HF_TOKEN", "hf_anotherReadToken")
    world.up("--run", "second")
    expected[world.replica()]["variables"]["REPLICA_RUN"] = "second"
    expected[world.replica()]["secrets"]["HF_TOKEN"] = "hf_anotherReadToken"
    assert made() == expected
    assert "hf_anotherReadToken" not in world.said


def test_a_changed_file_is_uploaded_in_one_commit(world: World, api):
    world.up()
    for path in ("env_space/game.py", "extra.txt"):
        file = {"path_or_fileobj": b"# by hand\n", "path_in_repo": path}
        api.upload_file(**file, repo_id=world.env, repo_type="space")
    before = world.hub.space(world.env)["commits"]
    world.up()
    made = world.hub.space(world.env)
    assert len(made["commits"]) == len(before) + 1
    assert "extra.txt" not in made["files"]
    assert "# by hand" not in made["files"]["env_space/game.py"]


def test_hardware_sleep_visibility_and_the_number_of_replicas_follow_the_plan(world: World, api, monkeypatch):
    monkeypatch.setenv("SPACE_HF_TOKEN", "hf_bucket_read")  # fine-grained, and enough for Spaces
    world.up("--replicas", "2")
    api.set_space_sleep_time(world.replica(), 86400)
    api.update_repo_settings(world.env, private=False, repo_type="space")
    out = world.up("--hardware", "l40sx1")
    made = world.hub.space(world.replica())
    assert made["requested"] == "l40sx1"
    assert made["sleep_time"] == 1800
    assert world.hub.space(world.env)["visibility"] == "private"
    assert f"delete {world.replica(2)}" in out
    assert [api.repo_exists(world.replica(n), repo_type="space") for n in (1, 2)] == [True, False]
    api.set_space_sleep_time(world.replica(), 86400)
    world.up("--hardware", "l40sx1")
    assert world.hub.space(world.replica())["sleep_time"] == 1800


def test_a_lost_key_is_replaced_on_all_spaces_and_a_paused_one_is_started_again(world: World):
    world.up()
    old = world.key()
    Path(f".deploy/{OWNER}/env").unlink()
    world.hub.set_space(world.replica(), stage="PAUSED")
    out = world.up()
    assert "made a new SPACE_KEY" in out
    assert f"restart {world.replica()} (PAUSED)" in out
    assert world.key() != old
    assert old not in out
    assert world.hub.space(world.env)["secrets"]["WORDLE_KEY"] == world.key()
    assert world.hub.space(world.replica())["secrets"]["REPLICA_KEY"] == world.key()


def test_the_next_up_finishes_an_interrupted_one(world: World, api):
    world.hub.fault(f"POST /api/spaces/{world.replica()}/secrets", status=500)
    assert "run the same command again" in world.fails("up")
    world.hub.clear()
    world.up()
    made = world.hub.space(world.replica())
    assert "inference_space/app.py" in made["files"]
    assert made["secrets"].keys() == {"HF_TOKEN", "REPLICA_KEY"}


@pytest.mark.parametrize(
    ("variable", "token", "words"),
    [
        ("SPACE_HF_TOKEN", "", ["SPACE_HF_TOKEN is not set", "type Read"]),
        ("SPACE_HF_TOKEN", "hf_write", ["SPACE_HF_TOKEN may write", "type Read"]),
        ("SPACE_HF_TOKEN", "hf_team", ["SPACE_HF_TOKEN may write", "type Read"]),
        ("SPACE_HF_TOKEN", "hf_expired", ["SPACE_HF_TOKEN", "does not know this token"]),
        ("SPACE_HF_TOKEN", "hf_r\u00e9ad", ["SPACE_HF_TOKEN has a character that no token has"]),
        ("HF_TOKEN", "hf_read", ["may not create anything for user", "type Write"]),
        ("HF_TOKEN", "hf_team", ["may not create anything for user", "type Write"]),
        ("HF_TOKEN", "hf_expired", ["does not know this token", "HF_TOKEN"]),
    ],
)
def test_an_unsuitable_token_is_refused_before_anything_is_made(world, monkeypatch, variable, token, words):
    monkeypatch.setenv(variable, token)
    before = world.changes()
    out = world.fails("up")
    assert all(word in out for word in words), out
    assert world.changes() == before


def test_an_account_without_a_plan_and_an_unreachable_hub_are_reported_in_one_sentence(world, monkeypatch):
    world.hub.add_account("poor", is_pro=False, can_pay=False)
    world.hub.add_token("hf_poorOnesToken", user="poor")
    monkeypatch.setenv("HF_TOKEN", "hf_poorOnesToken")
    out = world.fails("up", "--owner", "poor").splitlines()[-1]
    assert "asks for payment (402): Docker Spaces need PRO" in out
    assert "hf_poorOnesToken" not in out
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (out,) = world.fails("up").splitlines()
    assert "gave no answer" in out
    assert "HF_ENDPOINT" in out


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("BUILD_ERROR", ["BUILD_ERROR", "build log"]),
        ("RUNTIME_ERROR", ["RUNTIME_ERROR", "run log"]),
        ("CONFIG_ERROR", ["CONFIG_ERROR", "build log"]),
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
    world.apps = type(world.apps)(world.apps.env, "http://127.0.0.1:9")
    assert "no answer" in world.run("status")[1]


def test_logs_are_those_of_the_build_while_it_builds_and_of_the_app_afterwards(world: World):
    world.up()
    assert "choose env, replica-1" in world.fails("logs", "replica-7")
    world.hub.log(world.replica(), f"the app wrote {READ}", "run")
    world.hub.log(world.replica(), "the image grows", "build")
    _, out = world.run("logs", "replica-1")
    assert "the app wrote ***" in out
    assert "the image grows" not in out
    world.hub.set_space(world.replica(), stage="BUILD_ERROR")
    _, out = world.run("logs", "replica-1")
    assert "the image grows" in out


def test_pause_stops_what_costs_and_resume_starts_it_again(world: World):
    world.up()
    world.run("pause")
    assert {world.hub.space(name)["stage"] for name in (world.env, world.replica())} == {"PAUSED"}
    _, out = world.run("status")
    assert "now $0.00 per hour" in out
    status, out = world.run("resume")
    assert status == 0, out
    assert {world.hub.space(name)["stage"] for name in (world.env, world.replica())} == {"RUNNING"}


def test_down_leaves_the_bucket_and_spaces_of_similar_names(world: World, api):
    world.up("--replicas", "2")
    others = {f"{OWNER}/{world.name}-other", f"{OWNER}/my-{world.name}-env"}
    for name in others:
        api.create_repo(name, repo_type="space", space_sdk="docker")
    _, out = world.run("down")
    assert {space.id for space in api.list_spaces(author=OWNER) if world.name in space.id} == others
    assert api.bucket_info(f"{OWNER}/{world.name}").private
    assert "down --bucket" in out
    world.run("down", "--bucket")
    with pytest.raises(BucketNotFoundError):
        api.bucket_info(f"{OWNER}/{world.name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A page whose words are behind a link, with files that belong on no Space."""
    site = tmp_path / "site"
    words = tmp_path / "words"
    for path in (site / "index.html", site / "src" / "page.js", site / "run" / "model.safetensors"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {path.name}")
    words.mkdir()
    words.joinpath("answers.txt").write_text("crane")
    site.joinpath("words").symlink_to(words)
    for unwanted in (site / "node_modules" / "a.js", site / ".git" / "config", site / ".env"):
        unwanted.parent.mkdir(exist_ok=True)
        unwanted.write_text("secret")
    return site


def test_a_page_becomes_a_static_space_that_shows_exactly_its_files(world: World, api, folder: Path):
    page = f"{OWNER}/{world.name}-page"
    shown = ["index.html", "run/model.safetensors", "src/page.js"]
    out = world.up("--static", str(folder))
    assert f"create or update {page} (private, static)" in out
    assert "only accounts with access" in out
    made = world.hub.space(page)
    assert made["files"].keys() - {".gitattributes"} == {*shown, "words/answers.txt", "README.md"}
    assert (made["stage"], made["requested"]) == ("RUNNING", None)
    url = api.space_info(page).host
    with httpx.Client(trust_env=False, base_url=url) as visitor:
        assert visitor.get("/").status_code == 404, "private"
        out = world.up("--static", str(folder), "--public")
        assert f"create or update {page} (public, static)" in out
        assert url in out
        assert visitor.get("/").text == "this is index.html"
        assert visitor.get("/").headers["content-type"].startswith("text/html")
        assert visitor.get("/run/model.safetensors").text == "this is model.safetensors"
        assert visitor.get("/words/answers.txt?a=b").text == "crane"
        folder.joinpath("src", "page.js").unlink()
        folder.joinpath("index.html").write_text("new")
        world.up("--static", str(folder), "--public")
        assert visitor.get("/").text == "new"
        assert visitor.get("/src/page.js").status_code == 404


def test_a_run_becomes_a_page_with_a_card_and_a_badge_in_one_step(world: World, api, tmp_path: Path):
    url = (tmp_path / "bucket").as_uri()
    write_run(url, tmp_path / "base", versions=2)
    world.up("--static", f"{url}#test", "--public")
    page = f"{OWNER}/{world.name}-page"
    card = f"{world.hub.url}/spaces/{page}/resolve/main/card.png"
    with httpx.Client(trust_env=False, base_url=api.space_info(page).host) as visitor:
        for path in ("/", "/watch/index.html"):
            named = re.findall('property="og:image" content="(.*?)"', visitor.get(path).text)
            assert named == [card]
        assert 'og:title" content="Delta Weight Sync: test"' in visitor.get("/").text
        assert "test: v1" in visitor.get("/badge.svg").text
    with httpx.Client(trust_env=False, follow_redirects=True) as site:
        picture = site.get(card).content
        readme = site.get(f"{world.hub.url}/spaces/{page}/resolve/main/README.md").text
    assert picture == (CHECKOUT / "web" / "card.png").read_bytes()
    assert f"thumbnail: {card}" in readme.split("---")[1]
    assert "runs/other/run.json does not exist" in world.fails("up", "--static", f"{url}#other")


def test_a_page_stands_beside_the_apps_and_goes_with_them(world: World, api, folder: Path):
    page = f"{OWNER}/{world.name}-page"
    world.up("--static", str(folder), "--public")
    url = api.space_info(page).host
    _, out = world.run("status")
    assert rows(out) == {page: ["RUNNING", "-", "-", "-", "0.00"]}
    world.up()
    assert url not in os.environ["SPACES"], "the key goes to apps only"
    assert list(rows(world.run("status")[1])) == [world.env, world.replica(), page]
    assert "choose env, replica-1\n" in world.fails("logs", "page")
    world.run("pause")
    assert world.hub.space(page)["stage"] == "RUNNING"
    _, out = world.run("down")
    assert f"delete {page}" in out
    assert not [space.id for space in api.list_spaces(author=OWNER) if world.name in space.id]


def test_a_page_needs_no_plan_and_only_the_token_that_writes(world: World, monkeypatch, folder: Path):
    world.hub.add_account("poor", is_pro=False, can_pay=False)
    world.hub.add_token("hf_poorOnesToken", user="poor")
    monkeypatch.setenv("HF_TOKEN", "hf_poorOnesToken")
    monkeypatch.setenv("SPACE_HF_TOKEN", "")
    world.up("--owner", "poor", "--static", str(folder), "--public")
    world.run("down", "--owner", "poor")
    before = world.changes()
    assert "may not create anything for user" in world.fails("up", "--static", str(folder))
    folder.joinpath("README.md").write_text("# A page\n")
    assert "README.md lacks `sdk: static`" in world.fails("up", "--owner", "poor", "--static", str(folder))
    folder.joinpath("index.html").unlink()
    assert "has no index.html: name `web`" in world.fails("up", "--owner", "poor", "--static", str(folder))
    assert world.changes() == before


@pytest.mark.parametrize(("kind", "app"), [("docker", "env"), ("static", "page")])
def test_a_foreign_space_is_left_alone(world: World, api, folder: Path, kind, app):
    space = f"{OWNER}/{world.name}-{app}"
    api.create_repo(space, repo_type="space", space_sdk=kind)
    before = world.changes()
    options = ["--static", str(folder)] if kind == "static" else []
    refusal = f"{space} was not made by trainer.deploy, so nothing was changed: choose another --name"
    for command in (["up", *options], ["down"]):
        assert refusal in world.fails(*command)
    assert world.changes() == before


@pytest.mark.parametrize("command", ["status", "pause", "resume"])
def test_without_spaces_a_command_says_how_to_get_them(world: World, command):
    assert "run `up` to make them" in world.fails(command)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"replicas": 0}, ["--replicas"]),
        ({"owner": "me/you"}, ["--owner", "me/you"]),
        ({"name": "a b"}, ["--name"]),
        ({"run": "../other"}, ["--run", "not a run name"]),
    ],
)
def test_an_impossible_plan_is_refused_with_the_name_of_the_option(wish, words):
    possible = {"owner": "me", "name": "wordle", "run": "first", "replicas": 1}
    with pytest.raises(DeployError) as refusal:
        make_plan(**possible | wish, hardware="l4x1", public=False, trusted="")
    assert all(word in str(refusal.value) for word in words), refusal.value
