"""Keeps one vLLM at the run's newest version: watch HEAD, fetch, verify, stage, commit; join and heal.

Joining, waking from sleep, healing, being pinned and going back are one path, in place: check the wanted
version out of the bucket (newest anchor, then deltas), find what differs from it in the live parameters, and
commit that like any delta. vLLM generates meanwhile, and the digest of its live parameters proves the result.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from delta_weight_sync.heads import NoVersionError
from delta_weight_sync.lookout import Lookout
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import DeltaRef, ProtocolError
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.store import ObjectMissing
from delta_weight_sync.vllm.engine import Engine, EngineError
from delta_weight_sync.vllm.journal import Journal
from delta_weight_sync.vllm.labels import Label
from delta_weight_sync.vllm.layout import Layout, Shapes
from delta_weight_sync.vllm.orders import Orders
from delta_weight_sync.vllm.progress import CountingReader
from delta_weight_sync.vllm.refusals import Refusals, RefusedError

_BACKOFF_S = 3.0
log = logging.getLogger("delta_weight_sync")


class Follower:
    """Runs in a thread of the API server; `serving` and `report` may be read by any thread."""

    def __init__(
        self, reader: CountingReader, engine: Engine, *, name: str, folder: Path, poll_s: float
    ) -> None:
        """`name` is how the dashboard calls this replica, `folder` is scratch space."""
        self._reader, self._engine = reader, engine
        self._name, self._folder, self._poll_s = name, folder, poll_s
        self._journal = Journal(name)
        self._layout = Layout(reader, folder)
        self.orders = Orders(reader)
        self._refusals = Refusals()
        self.serving: Manifest | None = None  # the version whose bits are live, proven by digest
        self._served_last: Manifest | None = None
        self._lookout = Lookout(reader, poll_s)
        self._learned: Shapes = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._fetching, self._heals = False, False
        self._logged = ""

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following, and end the vLLM that it started, also one that is just being started."""
        self._stopped.set()
        self._lookout.close()
        while self._thread.is_alive():
            self._engine.stop()
            self._thread.join(0.5)
        self._engine.stop()

    def poke(self) -> None:
        """Somebody says that there is a new version."""
        self._lookout.poke()

    def report(self, after: int) -> ReplicaReport:
        """What the replica is doing, and its remembered commits of versions newer than `after`."""
        progress = self._reader.progress() if self._fetching else ""
        return self._journal.report(self.serving, progress, self._lookout.how(), after)

    def explain(self, error: Exception | None) -> str:
        """What to say about an error; called with None when all is well again."""
        return f"{error}"

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._turn():
                    self.explain(None)
                self._lookout.wait(self._poll_s)
            except Exception as error:  # noqa: BLE001 - whatever it was: report it, keep serving, try again
                self._complain(error)
                self._lookout.wait(_BACKOFF_S)

    def _complain(self, error: Exception) -> None:
        """Report what went wrong, and log it once."""
        reason = self.explain(error)
        refused = isinstance(error, RefusedError) and self.serving is None
        self._journal.note("refused" if refused else None, reason)
        self._log(reason)

    def _log(self, reason: str) -> None:
        if reason != self._logged:
            log.warning("replica %s: %s", self._name, reason)
            self._logged = reason

    def _turn(self) -> bool:
        """Do what is to be done; False if that was nothing, so that what went wrong before still holds."""
        if self.serving is not None and not self._engine.alive():
            self.serving = None
            self._refusals.forget()
            self._lookout.again()
            raise EngineError("vLLM died; the lines above say why")
        held = self._held()
        if self.orders.healing.is_set():
            self.orders.healing.clear()
            self._refusals.forget()
            self._lookout.forget()
            self._heals = True
        if self._heals:
            self._heal(held)
        elif held is None:
            return self._look()
        else:
            self._hold(held)
        return True

    def _heal(self, held: Manifest | None) -> None:
        """Compare all weights with those of the version that is wanted, until that was done or is refused."""
        try:
            if wanted := held or self._reader.newest():
                self._follow(wanted, held, afresh=True)
            self._heals = False
        except RefusedError:
            self._heals = False
            raise

    def _held(self) -> Manifest | None:
        """The version that the owner wants, whatever the newest is."""
        return self._served_last if self.orders.paused else self.orders.pinned

    def _hold(self, manifest: Manifest) -> None:
        """Serve `manifest`'s version and no other."""
        self._lookout.again()
        if manifest != self.serving or self._journal.error:
            self._follow(manifest, manifest)

    def _look(self) -> bool:
        """Serve the newest version; False where it is not time to look for one."""
        if not self._lookout.due():
            return False
        try:
            newest = self._lookout.look()
        except NoVersionError:
            self._journal.note("waiting for the run's first version")
            return True
        if newest:
            self._follow(newest)
            self._lookout.taken()
        self._name_refused()
        return True

    def _name_refused(self) -> None:
        """Say what was passed over while a sound version is served; nothing where all is well."""
        complaint = self._lookout.complaint()
        if complaint:
            self._log(str(complaint))
        if str(complaint or "") != (self._journal.error or ""):
            self._journal.note("serving", str(complaint) if complaint else None)

    def _follow(self, manifest: Manifest, held: Manifest | None = None, *, afresh: bool = False) -> None:
        """Serve a version, comparing all weights if `afresh`; `held` is it if the owner wants no other."""
        self._refusals.ask(manifest, held)
        if self.serving is None and not held:
            self._begin(manifest)
        elif self.serving is None or afresh:
            self._join(manifest)
        elif manifest != self.serving:
            self._advance(manifest, self.serving)
        else:
            self._journal.note("serving")

    def _begin(self, manifest: Manifest) -> None:
        """Join; where a file of the version is damaged, at the newest one before it that is whole."""
        try:
            self._join(manifest)
        except (ProtocolError, ObjectMissing):
            older = self._reader.buildable(manifest)
            if older is None or older == manifest:
                raise
            self._join(older)
            raise

    def _join(self, manifest: Manifest) -> None:
        """From whatever is live to `manifest`'s version."""
        started = time.perf_counter()
        folder, shapes = self._lay_out(manifest)
        fetch_s = time.perf_counter() - started
        try:
            self._prepare(manifest, folder, shapes)
            stage_s = self._engine.stage_checkpoint(folder)
            seconds = self._engine.commit(manifest.digest, str(Label.of(manifest)))
        except EngineError as error:
            self._refusals.judge(error)
            raise
        self._refusals.forget()
        self._layout.done()
        self._serve(manifest, fetch_s, stage_s, *seconds, joined=True)

    def _prepare(self, manifest: Manifest, folder: Path, shapes: Shapes) -> None:
        """Have a vLLM that knows where the tensors of the run are."""
        if started := not self._engine.serves(folder):
            self.serving, self._learned = None, {}
            self._journal.note(f"starting vLLM with version {manifest.version}")
            self._engine.start(folder)
        if shapes != self._learned:
            found = self._engine.learn(shapes)
            if started and found != manifest.digest:
                self._engine.stop()  # or what it reads wrongly would be taken for an older version
                raise EngineError(
                    f"vLLM has just loaded {manifest.digest}, and {found} is where deltas would go; "
                    "serve another model",
                    "CodecError",
                )
            self._learned = shapes

    def _lay_out(self, manifest: Manifest) -> tuple[Path, Shapes]:
        """Fetch a version."""
        if self.serving is None:
            self._journal.note(f"fetching version {manifest.version}")
        self._reader.expect(manifest, self._folder)
        self._fetching = self.serving is None
        try:
            return self._layout.put(manifest)
        finally:
            self._fetching = False

    def _advance(self, manifest: Manifest, serving: Manifest) -> None:
        """From the version that is served to `manifest`'s."""
        anchor, deltas = self._reader.way(manifest, serving.version)
        unchanged = not any(delta.changed for delta in deltas)
        if anchor or not deltas or (unchanged and manifest.digest != serving.digest):
            self._join(manifest)  # too far behind, or a history other than the one that is served
            return
        if unchanged:
            self._engine.relabel(str(Label.of(manifest)))
            self._serve(manifest)
            return
        try:
            self._apply(manifest, deltas)
        except EngineError as error:  # the old weights are back; are the live ones not what we believed?
            if error.kind == "WeightsChangedError":
                self.serving = None
            self._journal.note(error=f"version {manifest.version} was undone, healing: {error}")
            self._join(manifest)

    def _apply(self, manifest: Manifest, deltas: tuple[DeltaRef, ...]) -> None:
        started, paths = time.perf_counter(), list[Path]()
        try:
            for delta in deltas:
                paths.append(self._reader.fetch(delta, self._folder))
            fetch_s = time.perf_counter() - started
            stage_s = self._engine.stage(paths)
            seconds = self._engine.commit(manifest.digest, str(Label.of(manifest)))
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        self._serve(manifest, fetch_s, stage_s, *seconds)

    def _serve(self, manifest: Manifest, *seconds: float, joined: bool = False) -> None:
        self._journal.signed_by = self._reader.signer(manifest)
        self.serving = self._served_last = manifest
        self._journal.commit(manifest, *seconds, joined=joined)
        self._journal.note("serving")
