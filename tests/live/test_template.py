"""With real vLLM: an unsigned run's chat template is not run; SIGTERM ends a Space with a stopped engine."""

from pathlib import Path

import httpx
import psutil
import pytest

from tests.live.replica import PATIENCE_S, Replica, engine_of, greedy
from tests.live.run import training

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.finding(14)]

LOOPS = 3 * "{% for i in range(9999) %}" + "x" + 3 * "{% endfor %}"
CHAT = {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}


def test_a_template_without_end_hangs_neither_the_start_nor_a_request(tmp_path: Path) -> None:
    with (
        training(tmp_path, LOOPS) as trainer,
        Replica(trainer.bucket.url, "live", tmp_path / "replica") as replica,
    ):
        replica.wait_for(0)
        answer = httpx.post(f"{replica.url}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S)
        assert (answer.status_code, "set DELTA_WEIGHT_SYNC_PUBLIC_KEY" in answer.text) == (400, True)
        assert greedy(replica.url)
        family = psutil.Process(replica.pid).children(recursive=True)
        engine_of(replica).suspend()
        replica.stop()
        assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
