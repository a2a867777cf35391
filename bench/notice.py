"""`python -m bench.notice`: how soon replicas know of a version, and how many requests that takes.

Followers without vLLM, as threads in few processes, look out for the versions of a real writer at the
simulated Hub: by its events, by pokes, and by looking once a second. Both delays begin when the Hub has the
new HEAD; one ends when a follower begins to look, the other when it has read and checked the manifest.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

import httpx

from bench.tables import table
from delta_weight_sync.publish.writer import RunWriter
from delta_weight_sync.records import AnchorRef
from delta_weight_sync.store import open_bucket
from tests.support.hubsim import HubSim
from trainer.observe import Pokes
from trainer.spaces import Fleet

WAYS = ("events", "pokes", "looking")
BUCKET, RUN = "team/notice", "notice"
FREE_USER = (
    5000  # requests for files in five minutes: what many followers share where they look by themselves
)
IN_ONE_PROCESS, IDLE_S, PATIENCE_S = 64, 20.0, 300.0
HEAD = [
    *("followers", "notice by", "told after", "known after", "the last", "requests per version"),
    "idle, in 5 minutes",
]


@dataclass(frozen=True)
class Followers:
    """Where the processes of the followers answer, and how many there are in each."""

    ports: tuple[int, ...]
    counts: tuple[int, ...]

    def urls(self) -> list[str]:
        """Where each of them is poked."""
        places = zip(self.ports, self.counts, strict=True)
        return [f"http://127.0.0.1:{port}/{n}" for port, count in places for n in range(count)]

    def known(self, version: int) -> list[tuple[float, float, float]]:
        """When each of them began to look, found and staged `version`, once all have."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            said = [one for port in self.ports for one in httpx.get(f"http://127.0.0.1:{port}/").json()]
            if all(str(version) in one for one in said):
                return [one[str(version)] for one in said]
            time.sleep(0.2)
        raise TimeoutError(f"version {version} was not known to all in {PATIENCE_S:.0f} s")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.notice", description=__doc__)
    parser.add_argument("--followers", default="1,16,256", help="how many, with commas between")
    parser.add_argument("--versions", type=int, default=10, help="of each run; more than 64 followers get 3")
    asked, rows = parser.parse_args(), []
    for count in map(int, asked.followers.split(",")):
        for way in WAYS:
            rows.append(measured(way, count, min(asked.versions, 3 if count > IN_ONE_PROCESS else 99)))
            print(*rows[-1], sep=" | ", flush=True)
    print(table(HEAD, rows))


def measured(way: str, count: int, versions: int) -> list[str]:
    """A row, of a run of its own at a Hub of its own."""
    with tempfile.TemporaryDirectory() as name, HubSim(Path(name)) as hub:
        os.environ.update(hub.env(Path(name) / "home"))
        hub.feed(ping_s=30.0)
        if way != "events":
            hub.fault("GET .*/events", status=404)
            hub.limit(files=FREE_USER if count > IN_ONE_PROCESS else 0)
        writer = begun(Path(name))
        own = requests(hub, lambda: publish(writer))
        with following(count) as followers:
            pokes = Pokes(Fleet(followers.urls() if way == "pokes" else []))
            writer.on_version = pokes.send
            cells = observed(hub, writer, followers, versions, own)
            pokes.close()
    return [str(count), way, *cells]


def observed(hub: HubSim, writer: RunWriter, followers: Followers, versions: int, own: int) -> list[str]:
    """The figures of one run; `own` requests are the writer's for each version."""
    count, told, known, made = sum(followers.counts), list[float](), list[float](), list[float]()
    followers.known(1)
    time.sleep(5.0)  # until all have connections, where there are events
    idle = requests(hub, lambda: time.sleep(IDLE_S)) / IDLE_S / count
    for version in range(2, versions + 2):
        time.sleep(random.uniform(1.0, 3.0))  # looks must not keep step with versions

        def one(version: int = version) -> None:
            publish(writer)
            seen, there = followers.known(version), changed_at()
            told.extend(looked - there for looked, _, _ in seen)
            known.extend(read - there for _, read, _ in seen)

        made.append((requests(hub, one) - own - 1) / count)  # one is ours: when HEAD changed
    seconds = [f"{value:.3f} s" for value in (median(told), median(known), max(known))]
    return [*seconds, f"{median(made):.1f}", f"{300 * idle:.0f}"]


def requests(hub: HubSim, work: Callable[[], object]) -> int:
    """How many requests came meanwhile."""
    before = len(hub.requests())
    work()
    return len(hub.requests()) - before


def begun(folder: Path) -> RunWriter:
    """A run with version 0."""
    (folder / "assets").mkdir()
    (folder / "model.safetensors").write_bytes(b"what no follower reads here")
    bucket = open_bucket(f"hf://buckets/{BUCKET}", create=True)
    writer = RunWriter(bucket, RUN, model="none", assets=folder / "assets")
    files = writer.put_weights(0, [folder / "model.safetensors"])
    anchor = AnchorRef(version=0, files=tuple(files))
    writer.commit([], anchor, digest="0" * 16, sync=0, total=1 << 30, created_at=time.time())
    return writer


def publish(writer: RunWriter) -> None:
    """One more version."""
    assert writer.newest
    version = writer.newest.version + 1
    delta = writer.put_delta(version, os.urandom(1000), 1000)
    writer.commit(
        [delta], None, digest=f"{version:016x}", sync=version, total=1 << 30, created_at=time.time()
    )


def changed_at() -> float:
    """When the Hub got the HEAD that it has."""
    url = f"{os.environ['HF_ENDPOINT']}/api/buckets/{BUCKET}/tree/runs/{RUN}/heads"
    (head,) = httpx.get(url, headers={"authorization": "Bearer hf_write"}).json()
    return datetime.fromisoformat(head["uploadedAt"]).timestamp()


@contextlib.contextmanager
def following(
    count: int, url: str = f"hf://buckets/{BUCKET}#{RUN}", *options: str, **environment: str
) -> Iterator[Followers]:
    """So many followers of the run at `url`, in few processes."""
    counts = [min(IN_ONE_PROCESS, count - first) for first in range(0, count, IN_ONE_PROCESS)]
    words = [[sys.executable, "-m", "bench.notice_followers", str(n)] for n in counts]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started([*word, url, *options], environment)) for word in words]
        ports = [int(process.stdout.readline()) for process in processes if process.stdout]
        yield Followers(tuple(ports), tuple(counts))


@contextlib.contextmanager
def started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    main()
