"""Keeps one vLLM at the run's newest version, or at the one that its owner wants; heals it."""

from __future__ import annotations

import threading
from pathlib import Path

from delta_weight_sync.heads import NoVersionError
from delta_weight_sync.lookout import Lookout
from delta_weight_sync.patience import FIRST_S, Patience
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.vllm.engine import Engine, EngineError
from delta_weight_sync.vllm.journal import Journal
from delta_weight_sync.vllm.live_version import LiveVersion
from delta_weight_sync.vllm.orders import Orders
from delta_weight_sync.vllm.progress import CountingReader
from delta_weight_sync.vllm.refusals import RefusedError


class Follower:
    """Runs in a thread of the API server; `serving` and `report` may be read by any thread."""

    def __init__(
        self, reader: CountingReader, engine: Engine, *, name: str, folder: Path, poll_s: float
    ) -> None:
        """`name` is how the dashboard calls this replica, `folder` is scratch space."""
        self._reader, self._engine, self._poll_s = reader, engine, poll_s
        self._journal = Journal(name)
        self._live = LiveVersion(reader, engine, self._journal, folder)
        self.orders = Orders(reader)
        self._lookout, self._obeying = Lookout(reader, poll_s), Patience()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._heals = False

    @property
    def serving(self) -> Manifest | None:
        """The version whose bits are live, proven by digest."""
        return self._live.serving

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
        return self._journal.report(self.serving, self._live.progress(), self._lookout.how(), after)

    def explain(self, error: Exception | None) -> str:
        """What to say about an error; called with None when all is well again."""
        return f"{error}"

    def _run(self) -> None:
        while not self._stopped.is_set():
            wait_s = self._poll_s
            try:
                if self._turn():
                    self.explain(None)
            except Exception as error:  # noqa: BLE001 - whatever it was: report it, keep serving, try again
                self._complain(error)
                wait_s = min(wait_s, FIRST_S)
            self._lookout.wait(wait_s)

    def _complain(self, error: Exception) -> None:
        """Report what went wrong, and log it once."""
        reason = self.explain(error)
        refused = isinstance(error, RefusedError) and self.serving is None
        self._journal.complain(reason, "refused" if refused else None)

    def _turn(self) -> bool:
        """Do what is to be done; False if that was nothing, so that what went wrong before still holds."""
        self._require_alive()
        held = self.orders.held(self._live.served_last)
        if self.orders.healing.is_set():
            self.orders.healing.clear()
            self._live.try_all_again()
            self._lookout.forget()
            self._obeying.forget()
            self._heals = True
        return self._look() if held is None else self._hold(held)

    def _require_alive(self) -> None:
        try:
            self._live.require_alive()
        except EngineError:
            self._lookout.again()
            self._obeying.forget()
            raise

    def _hold(self, manifest: Manifest) -> bool:
        """Serve `manifest`'s version and no other; what fails is tried again ever more slowly."""
        self._lookout.again()
        if manifest == self.serving and not (self._journal.error or self._heals):
            return True
        if not self._obeying.allows(manifest.seal):
            return False
        try:
            self._become(manifest, manifest)
        except Exception:
            self._obeying.failed(manifest.seal)
            raise
        return True

    def _look(self) -> bool:
        """Serve the newest version; False where it is not time to look for one, or to try it again."""
        try:
            taken = self._lookout.take(lambda newest: self._become(newest, None))
        except NoVersionError:
            self._journal.note("waiting for the run's first version")
            return True
        if taken:
            self._journal.passed_over(self._lookout.complaint())
        return taken

    def _become(self, manifest: Manifest, held: Manifest | None) -> None:
        """Serve a version; one that was asked to heal compares all weights, until that is done or refused."""
        try:
            self._live.become(manifest, held, afresh=self._heals)
        except RefusedError:
            self._heals = False
            raise
        self._heals = False
