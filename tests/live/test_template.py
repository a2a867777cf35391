"""With real vLLM: an unsigned run's chat template is not run; without a chat all goes on."""

from pathlib import Path

import httpx
import pytest

from examples import tiny_policy as tiny
from tests.live.replica import PATIENCE_S, Replica, greedy
from tests.live.run import Trainer

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.finding(14)]

LOOPS = 3 * "{% for i in range(9999) %}" + "x" + 3 * "{% endfor %}"
CHAT = {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}


def test_a_template_without_end_hangs_neither_the_start_nor_a_request(tmp_path: Path) -> None:
    tiny.build(tmp_path / "base", tie=True, seed=0)
    (tmp_path / "base" / "chat_template.jinja").write_text(LOOPS)
    trainer = Trainer((tmp_path / "bucket").as_uri(), tmp_path / "base")
    replica = Replica(trainer.bucket.url, "live", tmp_path / "replica")
    try:
        trainer.publish()
        replica.start()
        replica.wait_for(0)
        answer = httpx.post(f"{replica.url}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S)
        assert (answer.status_code, "set DELTA_WEIGHT_SYNC_PUBLIC_KEY" in answer.text) == (400, True)
        assert greedy(replica.url)
    finally:
        replica.stop()
        trainer.close()
