"""The page of a run: README.md next to its run.json."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from safetensors.torch import save_file

import delta_weight_sync
from delta_weight_sync import Publisher
from delta_weight_sync.publish.run_page import run_page
from delta_weight_sync.reader import open_run
from delta_weight_sync.signing import make_keys
from tests.cli.command import command


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "my-policy"
    folder.mkdir()
    save_file({"w": torch.ones(500, 800, dtype=torch.bfloat16)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def publish(url: str, base: Path, **options: object) -> str:
    """Publish two versions; returns the page."""
    with Publisher(url, base=base, **options) as publisher:
        publisher.publish({"w": torch.ones(500, 800)})
        publisher.flush()
        page = publisher.reader.bucket.get(f"runs/{publisher.reader.keys.run}/README.md").decode()
        publisher.publish({"w": torch.ones(500, 800)})
    return page


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_it_tells_what_the_run_is_and_its_commands_work(base, tmp_path, monkeypatch):
    page = publish(f"{(tmp_path / 'a bucket').as_uri()}#first", base)
    assert all(said in page for said in ("# Run `first`", "`my-policy`", "400 K (800 KB)", "signed: no"))
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    done = {
        line.split()[1]: command(*shlex.split(line)[1:], *["--once"] * ("follow" in line)) for line in lines
    }
    assert {name: (result.code, result.complaint) for name, result in done.items()} == dict.fromkeys(
        ("follow", "log", "verify", "checkout"), (0, "")
    )
    followed = []
    follow = delta_weight_sync.follow
    monkeypatch.setattr(delta_weight_sync, "follow", lambda *where, **how: follow(*where, **how, once=True))
    (code,) = blocks(page, "python")
    exec(code, {"print": lambda version, *_: followed.append(version)})
    assert followed == [1]


def test_a_reader_of_a_signed_run_learns_that_a_key_is_needed(base, tmp_path):
    public = make_keys(keys := tmp_path / "keys")
    page = publish((tmp_path / "bucket").as_uri(), base, signing_key=keys)
    assert "signed: yes" in page
    assert "DELTA_WEIGHT_SYNC_PUBLIC_KEY" in page
    assert public not in page, "a key beside the versions proves nothing"


@pytest.mark.parametrize(
    "name",
    [
        "<img src=x onerror=alert(1)>",
        "` <img src=x> `` <b>",
        "```\n# Heading\n[a](https://a.example)",
        "- a\r\n\n- [b](javascript:b)\x1b[2J",
        "https://a.example www.a.example a@a.example",
        "{run} {0} %s | ~~a~~ **b**",
        "",
    ],
)
def test_a_name_is_only_text(base, tmp_path, name):
    publish((tmp_path / "bucket").as_uri(), base)
    first = open_run((tmp_path / "bucket").as_uri()).manifest(0)
    url = f"file:///{name}"
    usual = run_page("file:///a", "a", first)
    page = run_page(url, name, first)
    shown, expected = (MarkdownIt().render(each.decode()) for each in (page, usual))
    assert [*re.findall("<[a-z0-9]+", shown)] == [*re.findall("<[a-z0-9]+", expected)], "the same elements"
    assert "\x1b" not in shown
