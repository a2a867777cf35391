"""A stranger with write access to the bucket: deletes, damages, or puts back objects."""

from __future__ import annotations

import contextlib
from random import Random

from delta_weight_sync.errors import DeltaWeightSyncError, ProtocolError
from delta_weight_sync.prune import Keep, Pruner, prune
from delta_weight_sync.reader import RunReader
from delta_weight_sync.store import open_bucket
from tests.chaos.truth import RUN

KINDS = ("heads/", "manifests/", "deltas/", "anchors/", "run.json", "log/")
DAMAGES = ("deleted", "torn", "empty", "flipped", "swapped")


class Vandal:
    def __init__(self, url: str) -> None:
        self._bucket = open_bucket(url, create=True)
        self._folder = f"runs/{RUN}/"
        self._heads: list[tuple[str, bytes]] = []

    def remember(self) -> None:
        for info in self._bucket.list(f"{self._folder}heads/"):
            self._heads = [*self._heads[-50:], (info.key, self._bucket.get(info.key))]

    def replay(self, rng_seed: int) -> str:
        """Put an old HEAD back, under its own name or that of the newest."""
        rng = Random(rng_seed)
        key, data = rng.choice(self._heads)
        newest = self._bucket.list(f"{self._folder}heads/")
        if newest and rng.random() < 0.5:
            key = newest[-1].key
        self._bucket.put(key, data)
        return key

    def damage(self, kind: str, how: str, rng_seed: int) -> str | None:
        """Damage one of the five newest objects of a kind; returns its key, None if there is none."""
        rng = Random(rng_seed)
        there = [info.key for info in self._bucket.list(self._folder)]
        needed = set(self._needed(kind)) & set(there)  # an earlier fault may have deleted what is needed
        keys = [key for key in sorted(needed) or there if key.startswith(self._folder + kind)][-5:]
        if not keys:
            return None
        key = rng.choice(keys)
        if how == "deleted":
            self._bucket.delete([key])
            return key
        data = self._bucket.get(key)
        middle = len(data) // 2
        if how == "torn":
            data = data[:middle]
        elif how == "empty":
            data = b""
        elif how == "flipped":
            data = data[:middle] + b"\0" + data[middle + 1 :]
        else:
            data = self._bucket.get(keys[0]) if keys[0] != key else b"{}"
        self._bucket.put(key, data)
        return key

    def _needed(self, kind: str) -> list[str]:
        """The objects of a kind that the newest version is built from."""
        if kind not in ("deltas/", "anchors/"):
            return []
        try:
            newest = RunReader(self._bucket, RUN).newest()
        except DeltaWeightSyncError:
            return []
        files = newest.anchor.files + newest.deltas if newest else ()
        return sorted(file.key for file in files)

    def wipe(self) -> None:
        self._bucket.delete([info.key for info in self._bucket.list(self._folder)])

    def collect(self) -> None:
        """Delete what is older than a second and not needed; nothing if a manifest is damaged."""
        pruner = Pruner(RunReader(self._bucket, RUN), Keep.parse("1KB"), grace_s=1.0)
        with contextlib.suppress(ProtocolError):
            if survey := pruner.survey():
                prune(self._bucket, survey)

    def close(self) -> None:
        pass
