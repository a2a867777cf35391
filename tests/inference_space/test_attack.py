"""A replica under attack: slow clients, floods, hostile bodies and a hostile bucket, all at once.

A trainer with the key still gets answers, memory stays bounded, and no process dies. Times are only printed.
"""

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from delta_weight_sync.signing import PUBLIC_KEY, new_pair
from tests.live.replica import HEADERS, KEY, PATIENCE_S, SMALL_CACHE, Replica
from tests.live.run import training

pytestmark = [pytest.mark.live, pytest.mark.long]

ASKED = 300
ATTACK_S = 60
PAIR = new_pair()


@pytest.fixture
def trainer(tmp_path):
    with training(tmp_path, keys=PAIR) as trainer:
        trainer.step()
        trainer.publish()
        yield trainer


@pytest.fixture
def replica(trainer, tmp_path):
    settings = {PUBLIC_KEY: PAIR[PUBLIC_KEY], "REPLICA_KEY": KEY, "REPLICA_VLLM_ARGS": SMALL_CACHE}
    with Replica(trainer.bucket.url, "live", tmp_path / "replica", environ=settings) as replica:
        replica.wait_for(1)
        yield replica


@contextlib.contextmanager
def again(every_s: float, work: Callable[[], object]) -> Iterator[None]:
    """Does `work` again and again in a thread, while the block runs."""
    done = threading.Event()

    def go_on() -> None:
        while not done.wait(every_s):
            work()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def memory(replica: Replica) -> int:
    """Bytes of all its processes."""
    root = psutil.Process(replica.pid)
    return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))


def completions(replica: Replica, going_on: Callable[[int], bool]) -> list[float]:
    """Seconds of each of a trainer's short completions, one after the other."""
    took = []
    body = {"model": "policy", "prompt": [1, 5, 9, 100], "max_tokens": 4, "ignore_eos": True}
    with httpx.Client(base_url=replica.url, headers=HEADERS, timeout=PATIENCE_S) as http:
        while going_on(len(took)):
            began = time.perf_counter()
            http.post("/v1/completions", json=body).raise_for_status()
            took.append(time.perf_counter() - began)
    return took


def test_a_trainer_is_answered_through_all_of_it(trainer, replica, capsys):
    completions(replica, lambda done: done < ASKED)
    processes = psutil.Process(replica.pid).children(recursive=True)
    quiet = completions(replica, lambda done: done < ASKED)
    log = replica.folder / "replica.log"
    lines = log.stat().st_size

    head = max(Path(urlsplit(trainer.bucket.url).path, "runs/live/heads").iterdir())
    was = head.read_bytes()
    scribbled = itertools.count(1)
    nonsense = itertools.cycle((b"", b"{", b"[" * 100_000, b"\0" * (4 << 20), was[:-9]))
    with again(0.2, lambda: head.write_bytes(next(nonsense)) and next(scribbled)):
        under, answers, grown = attacked(replica, ATTACK_S)
    head.write_bytes(was)
    written = log.stat().st_size - lines

    with capsys.disabled():
        print(f"\na trainer's completions in ms: quiet {times(quiet)}; under attack {times(under)}")
        print(f"memory +{grown / 1e6:.0f} MB, log +{written / 1e3:.1f} KB")
        print(answers)
    assert all(process.is_running() for process in processes)
    assert grown < 200e6
    assert written < 100e3
    assert next(scribbled) > 100, "HEAD was overwritten all the time"
    for kind in ("page: 200", "tick: 200", "no_event: 422", "big_head: 400", "half_a_body: 413"):
        assert answers.get(kind), f"the attack did not come through: {answers}"
    assert not [answer for answer in answers if ": 5" in answer], answers
    trainer.step()
    replica.wait_for(trainer.publish())


def attacked(replica: Replica, seconds: float) -> tuple[list[float], dict[str, int], int]:
    """Completions during an attack, its answers, and by how many bytes the replica's memory has grown."""
    before = memory(replica)
    sizes = [before]
    command = [sys.executable, "-m", "tests.inference_space.attack", str(replica.port), KEY, str(seconds)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attack,
        again(0.25, lambda: sizes.append(memory(replica))),
    ):
        under = completions(replica, lambda _: attack.poll() is None)
        answers = json.loads(attack.stdout.read())
    return under, answers, max(sizes) - before


def times(seconds: list[float]) -> str:
    middle = statistics.median(seconds)
    return f"p50 {middle * 1000:.1f}, p95 {percentile(seconds) * 1000:.1f} of {len(seconds)}"


def percentile(seconds: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(seconds, n=20)[-1]
