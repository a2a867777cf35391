"""Held-out games of a version in a bucket, on the real environment, by the policy that ships."""

import json
import sys
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

import trainer.policies
from delta_weight_sync import Publisher
from env_space.app import create_app
from env_space.settings import Settings
from tests.support.serving import serving
from trainer.tasks import held_out

POLICY = Path(trainer.policies.__file__).parent / "wordle-tiny"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """Version 0 is the policy; version 1 writes nothing but the end of its turn."""
    url = f"{tmp_path_factory.mktemp('bucket').as_uri()}#first"
    weights = load_file(POLICY / "model.safetensors")
    with Publisher(url, POLICY) as publisher:
        publisher.publish(weights.items(), 1)
        publisher.flush()
        weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
        publisher.publish(weights.items(), 2)
    return url


def played(monkeypatch, run: str, version: int, env_url: str, out: Path) -> list[bool]:
    arguments = ["--run", run, "--version", str(version), "--env_url", env_url, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["held_out", *arguments])
    held_out.main()
    solved: list[bool] = json.loads(out.read_text())
    return solved


def games(env_url: str) -> dict[str, float]:
    """How many ended on held-out words, by outcome."""
    lines = httpx.get(f"{env_url}/metrics").text.splitlines()
    counts = [line.rsplit(" ", 1) for line in lines if line.startswith("wordle_games_total")]
    assert all('split="held_out"' in name for name, _ in counts)
    return {name.split('"')[1]: float(count) for name, count in counts}


def test_two_versions_play_the_same_held_out_games(tmp_path, monkeypatch, run):
    monkeypatch.setattr(held_out, "GAMES", 40)
    with serving(create_app(Settings())) as url:
        first, again = (played(monkeypatch, run, 0, url, tmp_path / name) for name in ("a", "b"))
        assert first == again
        assert games(url)["solved"] == 2 * sum(first)
        assert sum(played(monkeypatch, run, 1, url, tmp_path / "c")) == 0
        assert sum(games(url).values()) == 120
        assert httpx.get(f"{url}/health").json()["sessions"] == 0, "also those that it gave up"
