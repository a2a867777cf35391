"""A bucket whose readers live in a time of their own: nobody waits, each request is counted and may fail."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delta_weight_sync.store import Bucket
from delta_weight_sync.store.notifications import Notifications
from delta_weight_sync.vllm.follower import Follower
from tests.cli.command import Result, command
from tests.support.fake_vllm import Mortal


class QuickTime:
    """In place of the bucket. Something may happen in each pause of its reader; `fault` may raise."""

    def __init__(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bucket, self.url = bucket, bucket.url
        self.now = self._end = 0.0
        self._follower: Follower | None = None
        self.asked, self.fetched = Counter[str](), list[str]()
        self.in_pauses: Callable[[], object] = lambda: None
        self.fault: Callable[[str, str], object] = lambda operation, key: None
        monkeypatch.setattr("delta_weight_sync.watch.monotonic", lambda: self.now)
        monkeypatch.setattr("delta_weight_sync.reader.open_bucket", lambda url: self)

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._bucket, name)

        def ask(key: str, *others: Any) -> Any:
            self.asked[name] += 1
            if name == "fetch":
                self.fetched.append(key)
            self.fault(name, key)
            return work(key, *others)

        return ask

    def notifications(self, prefix: str) -> Notifications:
        return _QuickNotifications(self)

    def fetched_of(self, part: str) -> int:
        """How often what has `part` in its key was fetched."""
        return sum(part in key for key in self.fetched)

    def pass_for(self, seconds: float, follower: Follower) -> None:
        """The replica follows for so long."""
        self._end, self._follower = self.now + seconds, follower
        follower._stopped.clear()
        follower._run()

    def follow(self, seconds: float, run: str, folder: Path, *words: str) -> Result:
        """`delta-weight-sync follow`, and Ctrl-C after so long."""
        self._end, self._follower = self.now + seconds, None
        return command("follow", self.url, "--run", run, "--into", folder, *words)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.in_pauses()
        if self.now >= self._end and self._follower is None:
            raise KeyboardInterrupt
        if self.now >= self._end and self._follower:
            self._follower._stopped.set()


class _QuickNotifications(Notifications):
    def __init__(self, time: QuickTime) -> None:
        super().__init__(clock=lambda: time.now)
        self._time = time

    def wait(self, seconds: float) -> None:
        self._time.passes(seconds)


class Serving(Mortal):
    """A vLLM that notes what it serves."""

    def __init__(self) -> None:
        super().__init__()
        self.served: list[str] = []  # labels, as they were committed

    def commit(self, digest: str, label: str) -> tuple[float, float]:
        self.served.append(label)
        return super().commit(digest, label)
