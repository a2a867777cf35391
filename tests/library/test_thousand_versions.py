"""A run of 1,000 versions that stays within a budget while replicas follow it and one joins."""

import threading
from pathlib import Path

import pytest

from delta_weight_sync.checkout import CheckpointFolder
from delta_weight_sync.errors import ObjectMissingError
from delta_weight_sync.prune import Keep
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from tests.cli.drifting import PATIENCE_S, RUN, Drifting

VERSIONS, BUDGET = 1000, 1_500_000


class Replica(threading.Thread):
    """Takes the newest version at every so many; what it holds was proven by its digest before it shows."""

    def __init__(self, url: str, folder: Path, every: int) -> None:
        super().__init__(daemon=True)
        self._reader, self._folder, self._every = RunReader(open_bucket(url), RUN), folder, every
        self._turn = threading.Condition()
        self._published = self._taken = self.takes = self.missed = 0
        self.held = ""

    def published(self, version: int) -> None:
        with self._turn:
            self._published = version
            self._turn.notify_all()

    def run(self) -> None:
        with CheckpointFolder(self._reader, self._folder) as kept:
            while self._taken < VERSIONS:
                with self._turn:
                    assert self._turn.wait_for(self._due, PATIENCE_S)
                try:
                    manifest = self._reader.newest()
                    kept.update(manifest)
                except (
                    ObjectMissingError
                ):  # deleted after the manifest was read: the next one names what is there
                    self.missed += 1
                    continue
                self._taken, self.held = manifest.version, manifest.digest
                self.takes += 1

    def _due(self) -> bool:
        return self._published == VERSIONS or self._published - self._taken >= self._every


@pytest.mark.full
def test_a_run_stays_within_its_budget_while_replicas_follow_and_one_joins(tmp_path):
    run = Drifting(tmp_path / "bucket", drift=5e-7, keep=Keep(size=BUDGET))
    run.outbox.shortcuts._pruner._grace_s = 0.0  # all of it happens within a minute
    replicas = [Replica(run.url, tmp_path / f"every {every}", every) for every in (1, 7, 90)]
    for replica in replicas:
        replica.start()
    bucket, sizes, written = open_bucket(run.url), [], 0
    for version in range(1, VERSIONS + 1):
        run.step()
        run.settle()  # as a trainer whose steps take longer than a jump
        written += sum(delta.size for delta in run.newest.deltas[-1:]) + len(run.newest.to_bytes())
        if version % 5 == 0:
            sizes.append(sum(info.size for info in bucket.list("")))
        if version == VERSIONS - 100:
            replicas.append(Replica(run.url, tmp_path / "joins", 1))
            replicas[-1].start()
        for replica in replicas:
            replica.published(version)
    for replica in replicas:
        replica.join(PATIENCE_S)
    run.close()
    assert [replica.held for replica in replicas] == [run.newest.digest] * 4
    assert max(sizes) <= BUDGET < written / 5
    assert replicas[0].takes > 100, "it does follow"
    assert sum(replica.missed for replica in replicas) < 50, "deleting is no race with reading"
    history = [manifest.version for manifest in RunReader(bucket, RUN).versions()]
    assert history == list(range(VERSIONS, VERSIONS - len(history), -1))
    assert len(history) > 30
