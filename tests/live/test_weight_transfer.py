"""vLLM's own weight transfer API by the backend's name alone: two servers get each version."""

import runpy
import shutil
import threading
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from delta_weight_sync.errors import EngineError
from delta_weight_sync.reader import open_run
from delta_weight_sync.vllm import BACKEND, PAUSE, hooks
from delta_weight_sync.weight_transfer import DeltaTrainerInitInfo
from tests.live.replica import PROMPTS, Server, ask, greedy, order, served

ROOT = Path(__file__).parents[2]
UPDATES = 10
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
OPTIONS = {"max-model-len": 256, "weight-transfer-config": f'{{"backend": "{BACKEND}"}}'}

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,  # three starts of vLLM
    pytest.mark.skipif(not hooks.TRANSFER.works(), reason="this vLLM has another weight transfer API"),
]


def test_vllms_example_runs_by_the_name_of_the_backend(tmp_path: Path):
    """Ten updates to two servers, which generate meanwhile; then one that loads the last version afresh. The
    second server commits in a pause of its own."""
    policy = shutil.copytree(ROOT / "trainer/policies/wordle-tiny", tmp_path / "policy")
    main = runpy.run_path(str(ROOT / "docs/examples/vllm_rl.py"))["main"]
    url = f"{(tmp_path / 'bucket').as_uri()}#rl"
    folders = [tmp_path / name for name in ("first", "second", "fresh")]
    for folder in folders:
        folder.mkdir()
    with (
        served(policy, "", folders[0], environ=DEV, **OPTIONS) as first,
        served(policy, "", folders[1], environ=DEV | {PAUSE: "1"}, **OPTIONS) as second,
    ):
        _is_refused_before_a_run_is_named(first)
        before = greedy(first.url)
        with Generating(first) as generating:
            main(str(policy), url, first.url, second.url, updates=UPDATES)
        newest = open_run(url).manifest()
        assert newest.sync == UPDATES
        assert newest.changed > 0
        # `send_weights` has returned, so nobody waits here.
        for server in (first, second):
            status = server.status()
            assert status["status"]["version"] == newest.version
            assert status["status"]["digest"] == newest.digest
            assert [commit["version"] for commit in status["commits"]] == list(range(newest.version + 1))
        assert generating.answers > 0
        after = greedy(first.url)
        assert after == greedy(second.url) != before
        open_run(url).checkout(newest, tmp_path / "checkout")
        with served(tmp_path / "checkout", url, folders[2], **{"max-model-len": 256}) as fresh:
            assert greedy(fresh.url) == after
        _says_why_it_refuses(first, second, url, policy)


class Generating:
    """Sends one request after the other, until the block ends. Each must be answered whole."""

    def __init__(self, server: Server) -> None:
        self.answers = 0
        self._server = server
        self._ended = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                assert len(ask(self._server.url, PROMPTS[0], 16).tokens) == 16
                self.answers += 1
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self._failed.append(error)

    def __enter__(self) -> "Generating":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        assert not self._failed, self._failed


def _is_refused_before_a_run_is_named(server: Server) -> None:
    wanted = {"update_info": {"version": 0, "digest": "0" * 16}}
    refused = httpx.post(f"{server.url}/update_weights", json=wanted)
    assert refused.status_code == 409
    assert "call init_weight_transfer_engine first" in refused.text


def _says_why_it_refuses(server: Server, second: Server, url: str, policy: Path) -> None:
    """A trainer gets the server's sentence: another run, a version that never comes, a server on hold."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    client = runpy.run_path(str(ROOT / "docs/examples/vllm_rl.py"))["EveryServer"]
    from vllm.distributed.weight_transfer import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    def engine(run: str):
        return WeightTransferTrainerFactory.trainer_init(
            DeltaTrainerInitInfo(run, base=policy, rank=0, timeout_s=60.0, options={"fresh": True}),
            client=client((server.url, second.url)),
            source=ModuleSource(model),
        )

    with pytest.raises(EngineError, match=r"this vLLM follows file://.*#rl, not file://.*#other"):
        engine(url.replace("#rl", "#other"))
    again = engine(url)  # the trainer was started again, from the base
    again.send_weights(UPDATES + 1)
    assert server.status()["status"]["digest"] == open_run(url).manifest().digest
    # vLLM's own examples pause the server around an update. It stays paused until they resume it.
    before = greedy(server.url)
    for each in (server, second):
        httpx.post(f"{each.url}/pause", params={"mode": "keep"}).raise_for_status()
    with torch.no_grad():
        model.model.norm.weight *= 2
    again.send_weights(UPDATES + 2)
    for each in (server, second):
        assert httpx.get(f"{each.url}/is_paused").json() == {"is_paused": True}
        httpx.post(f"{each.url}/resume").raise_for_status()
    assert before != greedy(server.url) == greedy(second.url)
    assert order(server, "pause").status_code == 200
    with pytest.raises(EngineError, match="paused: newer versions wait until you resume this replica"):
        again.send_weights(UPDATES + 3)
    assert order(server, "resume").status_code == 200
    again.shutdown()
    future = {"version": 999, "digest": "0" * 16, "timeout_s": 0.1}
    late = httpx.post(f"{server.url}/update_weights", json={"update_info": future})
    assert late.status_code == 504
    assert "version 999 is not live after 0.1 s: serving" in late.text
    labelled = httpx.post(f"{server.url}/finish_weight_update", json={"weight_version": "mine"})
    assert "labels tokens itself" in labelled.text
    assert httpx.post(f"{server.url}/shutdown_weight_transfer_engine").is_success
    assert httpx.get(f"{server.url}{server.status_path}").status_code == 503, "it follows no run again"
