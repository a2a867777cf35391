"""Finding 14, with real vLLM: a hostile chat template in an unsigned run hangs nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.replica import PATIENCE_S, Replica
from tests.live.run import Trainer, greedy
from tests.policies import tiny

pytestmark = pytest.mark.live

LOOPS = (
    "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}x{% endfor %}{% endfor %}"
)
BOMB = (
    "{% if messages[0].content == 'bomb' %}" + LOOPS + "{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


def chat(replica: Replica, content: str) -> httpx.Response:
    body: dict[str, Any] = {"model": "policy", "max_tokens": 4}
    body["messages"] = [{"role": "user", "content": content}]
    return httpx.post(f"{replica.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


def test_who_asks_for_the_loop_is_refused_and_all_others_are_answered(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny.build(base, tie=True, seed=0)
    (base / "chat_template.jinja").write_text(BOMB)
    trainer = Trainer((tmp_path / "bucket").as_uri(), base)
    trainer.publish()
    shutil.rmtree(base)
    replica = Replica(trainer.bucket.url, "live", tmp_path / "replica")
    replica.start()
    try:
        replica.wait_for(0)
        for _ in range(3):
            answer = chat(replica, "bomb")
            assert answer.status_code == 400
            assert "the run's chat template is not rendered, as it takes too many steps" in answer.text
            assert chat(replica, "hello").status_code == 200
        assert greedy(replica.url)
    finally:
        replica.stop()
        trainer.close()
