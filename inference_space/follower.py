"""Keeps one vLLM at the run's newest version: watch HEAD, fetch, verify, stage, commit; join and heal.

Joining late, waking from sleep and healing are one path: check the newest version out of the bucket (newest
anchor, then deltas), start vLLM from it, and prove by the digest of its live parameters that it holds it.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from pathlib import Path

from inference_space.orders import Orders
from inference_space.settings import Settings
from inference_space.vllm_server import VllmError, VllmServer
from shared.history import RunReader
from shared.protocol import DeltaRef, FileRef, Manifest
from shared.runlog import CommitEvent, ReplicaEvent, ReplicaReport

_BACKOFF_S = 3.0
_KEPT_COMMITS = 256
_KEPT_SYNCS = 4096  # more versions than one completion can span


class Follower:
    """Runs in a thread of the gateway's process; `serving` and `report` may be read by any thread."""

    def __init__(self, reader: RunReader, vllm: VllmServer, settings: Settings) -> None:
        self._reader, self._vllm, self._settings = reader, vllm, settings
        self._folder = Path(settings.folder)
        self.orders = Orders(reader)
        self.serving: Manifest | None = None  # the version whose bits are live, proven by digest
        self.syncs: dict[int, tuple[int, int]] = {}  # version -> (epoch, sync), for all that vLLM may name
        self._serving_ref: FileRef | None = None
        self._served_head = ""  # etag of the HEAD whose version is served
        self._commits: deque[CommitEvent] = deque(maxlen=_KEPT_COMMITS)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._state = "starting"
        self._error: str | None = None

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following and end vLLM."""
        self._stopped.set()
        self._thread.join()
        self._vllm.stop()

    def report(self, after: int) -> ReplicaReport:
        """What the replica is doing, and its remembered commits of versions newer than `after`."""
        serving = self.serving
        status = ReplicaEvent(
            t=time.time(),
            replica=self._settings.name,
            state=self._state,
            version=serving.version if serving else None,
            digest=serving.digest if serving else None,
            error=self._error,
        )
        commits = tuple(commit for commit in list(self._commits) if commit.version > after)
        return ReplicaReport(status=status, commits=commits)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._turn()
                self._stopped.wait(self._settings.poll_s)
            except Exception as error:  # noqa: BLE001 - whatever it was: report it, keep serving, try again
                self._report(error=f"{error}")
                print(f"replica {self._settings.name}: {error}", flush=True)
                self._stopped.wait(_BACKOFF_S)

    def _turn(self) -> None:
        if self.serving is not None and not self._vllm.alive():
            self.serving = None
            raise RuntimeError(f"vLLM died and is started again; see {self._vllm.log}")
        if self.serving is not None and self.orders.rejoining.is_set():
            self.orders.rejoining.clear()
            self._join(self.serving)
        if not self._obeyed():
            self._look()

    def _obeyed(self) -> bool:
        """True if the owner wants another version than the newest; it is served then."""
        if self.orders.pinned is None:
            return self.orders.paused and self.serving is not None
        if self.serving is None:
            self._join(self.orders.pinned)
        elif self.serving != self.orders.pinned:
            self._advance(self.orders.pinned, self.serving)
        self._serving_ref, self._served_head = None, ""  # so that HEAD is looked at again afterwards
        return True

    def _look(self) -> None:
        """Serve the newest version."""
        info = self._reader.bucket.stat(self._reader.keys.head)
        if info is None:
            self._report("waiting for the run's first version")
        elif self.serving is None or info.etag != self._served_head:
            self._follow()
            self._served_head = info.etag
        elif self._error:
            self._report("serving")

    def _follow(self) -> None:
        """Serve what HEAD names now."""
        head = self._reader.head()
        if head is None:
            return
        if self.serving is not None and head.manifest == self._serving_ref:
            return
        manifest = self._reader.manifest(head.manifest)
        if self.serving is None:
            self._join(manifest)
        else:
            self._advance(manifest, self.serving)
        self._serving_ref = head.manifest

    def _join(self, manifest: Manifest) -> None:
        """From nothing to serving `manifest`'s version."""
        started = time.time()
        folder = self._folder / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        if self.serving is None:
            self._report(f"fetching version {manifest.version}")
        state = self._reader.checkout(manifest, folder)
        shapes = {name: list(bits.shape) for name, bits in state.items()}
        del state
        fetch_s = time.time() - started
        self.serving = None
        self._report(f"starting vLLM with version {manifest.version}")
        self._vllm.start(folder)
        digest = self._vllm.init_engine(shapes)
        if digest != manifest.digest:
            self._vllm.stop()
            raise RuntimeError(
                f"vLLM loaded weights with digest {digest}, version {manifest.version} has {manifest.digest}"
            )
        self.syncs.clear()  # the run may have been started over: other versions with the same numbers
        self._expect(manifest)
        self._vllm.set_version(manifest.version)
        self._serve(manifest, fetch_s=fetch_s, joined=True)

    def _advance(self, manifest: Manifest, serving: Manifest) -> None:
        """From the version that is served to `manifest`'s."""
        deltas = manifest.deltas_after(serving.version)
        unchanged = not any(delta.changed for delta in deltas or ())
        if not deltas or (unchanged and manifest.digest != serving.digest):
            self._join(manifest)  # too far behind, or a history other than the one that is served
            return
        if unchanged:
            self._expect(manifest)
            self._vllm.set_version(manifest.version)
            self._serve(manifest)
            return
        try:
            self._apply(manifest, deltas)
        except VllmError as error:  # the old weights are back; are the live ones not what we believed?
            self._report(error=f"version {manifest.version} was undone, joining again: {error}")
            self._join(manifest)

    def _apply(self, manifest: Manifest, deltas: tuple[DeltaRef, ...]) -> None:
        started = time.perf_counter()
        paths = [self._reader.fetch(delta, self._folder) for delta in deltas]
        fetch_s = time.perf_counter() - started
        try:
            stage_s = self._vllm.stage(paths)
            self._expect(manifest)
            pause_s, commit_s = self._vllm.commit(manifest.digest, manifest.version)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        self._serve(manifest, fetch_s=fetch_s, stage_s=stage_s, pause_s=pause_s, commit_s=commit_s)

    def _expect(self, manifest: Manifest) -> None:
        """From now on vLLM may name this version as the maker of a token."""
        self.syncs[manifest.version] = (manifest.epoch, manifest.sync)
        if len(self.syncs) > _KEPT_SYNCS:
            del self.syncs[next(iter(self.syncs))]

    def _serve(
        self,
        manifest: Manifest,
        *,
        fetch_s: float = 0.0,
        stage_s: float = 0.0,
        pause_s: float = 0.0,
        commit_s: float = 0.0,
        joined: bool = False,
    ) -> None:
        now = time.time()
        self.serving = manifest
        self._commits.append(
            CommitEvent(
                t=now,
                replica=self._settings.name,
                version=manifest.version,
                digest=manifest.digest,
                lag_s=now - manifest.created_at,
                fetch_s=fetch_s,
                stage_s=stage_s,
                pause_ms=1e3 * pause_s,
                commit_ms=1e3 * commit_s,
                joined=joined,
            )
        )
        self._report("serving")

    def _report(self, state: str | None = None, error: str | None = None) -> None:
        """Take down what is going on; with an error the state stays what it was."""
        self._state, self._error = state or self._state, error
