"""Finding 14, with real vLLM: a hostile chat template in an unsigned run hangs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.replica import PATIENCE_S, Replica
from tests.live.run import Trainer, greedy
from tests.policies import tiny

pytestmark = pytest.mark.live

LOOPS = 3 * "{% for i in range(9999) %}" + "x" + 3 * "{% endfor %}"
BOMB = (
    "{% if messages[0].content == 'bomb' %}" + LOOPS + "{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


def complete(replica: Replica, prompt: str) -> httpx.Response:
    body = {"model": "policy", "max_tokens": 4, "prompt": prompt}
    return httpx.post(f"{replica.url}/v1/completions", json=body, timeout=PATIENCE_S)


def chat(replica: Replica, content: str) -> httpx.Response:
    body: dict[str, Any] = {"model": "policy", "max_tokens": 4}
    body["messages"] = [{"role": "user", "content": content}]
    return httpx.post(f"{replica.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


@contextmanager
def served(folder: Path, base: Path, **environ: str) -> Iterator[Replica]:
    """An unsigned run with what is in `base`, and its replica."""
    trainer = Trainer((folder / "bucket").as_uri(), base)
    trainer.publish()
    replica = Replica(trainer.bucket.url, "live", folder / "replica", environ=environ)
    replica.start()
    try:
        replica.wait_for(0)
        yield replica
    finally:
        replica.stop()
        trainer.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny.build(tmp_path / "base", tie=True, seed=0)
    return tmp_path / "base"


def test_who_asks_for_the_loop_is_refused_and_all_others_are_answered(tmp_path: Path, base: Path) -> None:
    (base / "chat_template.jinja").write_text(BOMB)
    with served(tmp_path, base) as replica:
        for _ in range(3):
            answer = chat(replica, "bomb")
            assert answer.status_code == 400
            assert "the run's chat template is not rendered, as it takes too many steps" in answer.text
            assert chat(replica, "hello").status_code == 200
        assert greedy(replica.url)
