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

from delta_weight_sync.protocol import DeltaRef, Manifest
from delta_weight_sync.runlog import CommitEvent, ReplicaEvent, ReplicaReport
from inference_space.access import refusal
from inference_space.orders import Orders
from inference_space.progress import CountingReader
from inference_space.settings import Settings
from inference_space.vllm_server import VllmError, VllmServer

_BACKOFF_S = 3.0
_KEPT_COMMITS = 256
_KEPT_SYNCS = 4096  # more versions than one completion can span


class Follower:
    """Runs in a thread of the gateway's process; `serving` and `report` may be read by any thread."""

    def __init__(self, reader: CountingReader, vllm: VllmServer, settings: Settings) -> None:
        self._reader, self._vllm, self._settings = reader, vllm, settings
        self._folder = Path(settings.folder)
        self.orders = Orders(reader)
        self.serving: Manifest | None = None  # the version whose bits are live, proven by digest
        self.problems: dict[str, str] = {}  # what the owner must set before the bucket can be read
        self.syncs: dict[int, tuple[int, int]] = {}  # version -> (term, sync), for all that vLLM may name
        self._served_last: Manifest | None = None
        self._served_head = ""  # etag of the HEAD whose version is served
        self._commits: deque[CommitEvent] = deque(maxlen=_KEPT_COMMITS)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._state, self._fetching = "starting", False
        self._error: str | None = None
        self._printed = ""

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following and end vLLM, also one that is just being started."""
        self._stopped.set()
        while self._thread.is_alive():
            self._vllm.stop()
            self._thread.join(0.5)
        self._vllm.stop()

    def report(self, after: int) -> ReplicaReport:
        """What the replica is doing, and its remembered commits of versions newer than `after`."""
        serving = self.serving
        status = ReplicaEvent(
            t=time.time(),
            replica=self._settings.name,
            state=f"{self._state}: {self._reader.progress()}" if self._fetching else self._state,
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
                self.problems = {}
                self._stopped.wait(self._settings.poll_s)
            except Exception as error:  # noqa: BLE001 - whatever it was: report it, keep serving, try again
                self._explain(error)
                self._stopped.wait(_BACKOFF_S)

    def _explain(self, error: Exception) -> None:
        """Report what went wrong, and print it once."""
        self.problems = refusal(error, self._reader.bucket.url)
        reason = "; ".join(f"{name}: {problem}" for name, problem in self.problems.items()) or f"{error}"
        self._report(error=reason)
        if reason != self._printed:
            print(f"replica {self._settings.name}: {reason}", flush=True)
            self._printed = reason

    def _turn(self) -> None:
        if self.serving is not None and not self._vllm.alive():
            self.serving = None
            raise RuntimeError(f"vLLM died and is started again; see {self._vllm.log}")
        held = self._held()
        if self.orders.rejoining.is_set():
            self.orders.rejoining.clear()
            self._follow(held, afresh=True)
        elif held is None:
            self._look()
        else:
            self._hold(held)

    def _held(self) -> Manifest | None:
        """The version that the owner wants, whatever the newest is."""
        return self._served_last if self.orders.paused else self.orders.pinned

    def _hold(self, manifest: Manifest) -> None:
        """Serve `manifest`'s version and no other."""
        self._served_head = ""  # so that HEAD is looked at again afterwards
        if manifest != self.serving or self._error:
            self._follow(manifest)

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

    def _follow(self, manifest: Manifest | None = None, *, afresh: bool = False) -> None:
        """Serve `manifest`'s version (None: what HEAD names now), by starting over if `afresh`."""
        manifest = manifest or self._newest()
        if manifest is None:
            return
        if self.serving is None or afresh:
            self._join(manifest)
        elif manifest != self.serving:
            self._advance(manifest, self.serving)
        else:
            self._report("serving")

    def _newest(self) -> Manifest | None:
        head = self._reader.head()
        return self._reader.manifest(head.manifest) if head else None

    def _join(self, manifest: Manifest) -> None:
        """From nothing to serving `manifest`'s version."""
        started = time.time()
        folder = self._folder / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        shapes = self._checkout(manifest, folder)
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

    def _checkout(self, manifest: Manifest, folder: Path) -> dict[str, list[int]]:
        """Fetch a version; returns the shapes of its tensors."""
        if self.serving is None:
            self._report(f"fetching version {manifest.version}")
        self._reader.expect(manifest, folder)
        self._fetching = self.serving is None
        try:
            state = self._reader.checkout(manifest, folder)
        finally:
            self._fetching = False
        return {name: list(bits.shape) for name, bits in state.items()}

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
        self.syncs[manifest.version] = (manifest.writer_term, manifest.sync)
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
        self.serving = self._served_last = manifest
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
