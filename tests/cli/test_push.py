"""`push`: a version as an ordinary model repository on the simulated Hub."""

from pathlib import Path

import pytest
from huggingface_hub import HfApi
from safetensors.torch import load_file

from delta_weight_sync import BucketError, ConfigError, Run
from tests.cli.command import command
from tests.support.published_run import write_run


@pytest.mark.usefixtures("hub_env")
def test_a_version_becomes_a_model_repository(hub, tmp_path):
    url = (tmp_path / "bucket").as_uri()
    write_run(url, tmp_path / "base", versions=3)
    run = Run(f"{url}#test")
    run.tag(1, "best")
    done = command("push", run.url, "--version", "best", "--to", "user/pushed")
    assert (done.code, done.complaint) == (0, "")
    assert f"version 1 (digest {run.manifest(1).digest}) is in user/pushed" in done.output
    api = HfApi(endpoint=hub.url)
    assert api.model_info("user/pushed").private

    def fetched(name):
        return Path(api.hf_hub_download("user/pushed", name, cache_dir=tmp_path / "cache"))

    run.checkout(tmp_path / "own", 1)
    pushed = load_file(fetched("model.safetensors"))
    own = load_file(tmp_path / "own" / "model.safetensors")
    assert all(tensor.equal(own[name]) for name, tensor in pushed.items())
    assert run.manifest(1).digest in fetched("README.md").read_text()
    run.push("user/pushed")
    assert "model.safetensors" in api.list_repo_files("user/pushed")
    with pytest.raises(ConfigError, match="write it as owner/name"):
        run.push("model")
    with pytest.raises(BucketError, match="could not be written"):
        run.push("stranger/model")
