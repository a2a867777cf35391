"""A trainer whose token will not do ends with one sentence that says so, before it has changed anything."""

from pathlib import Path

import pytest

from delta_weight_sync.store import open_bucket
from tests.hubsim import HubSim
from tests.policies import tiny
from trainer.train import main

BUCKET = "hf://buckets/team/wordle"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.build(folder, tie=True, seed=0)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    with HubSim(tmp_path_factory.mktemp("hub")) as hub, pytest.MonkeyPatch.context() as patch:
        for name, value in hub.env(hub.root / "client").items():
            patch.setenv(name, value)
        open_bucket(BUCKET, create=True)
        yield hub


TOKENS = [("hf_read", 403), ("hf_bucket_read", 403), ("hf_expired", 401), ("hf_typo", 401), ("", 401)]


@pytest.mark.parametrize(("token", "status"), TOKENS)
def test_publishing_takes_a_token_that_may_write(hub, base, tmp_path, monkeypatch, token, status):
    monkeypatch.setenv("HF_TOKEN", token)
    replica, output = ["--replicas", "http://127.0.0.1:9"], ["--output_dir", str(tmp_path)]
    where = ["--model", str(base), "--bucket", BUCKET, "--run", "first", "--task", "shorter", *replica]
    options = [*output, "--use_cpu", "true", "--bf16", "false", "--dtype", "float32", "--report_to", "none"]
    options += ["--token_budget", "512"]
    monkeypatch.setattr("sys.argv", ["trainer.train", *where, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    said = str(ended.value)
    assert said.startswith(f"trainer: the Hub refused write access to {BUCKET}")
    assert f" ({status}, " in said
    assert said.endswith("set HF_TOKEN to a token with write access to team/wordle")
    assert not token or token not in said
    monkeypatch.setenv("HF_TOKEN", hub.env(hub.root / "client")["HF_TOKEN"])
    assert open_bucket(BUCKET).list("") == [], "nothing was written"
