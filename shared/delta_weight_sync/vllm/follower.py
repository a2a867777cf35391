"""Keeps one vLLM at the run's newest version, or at the one that its owner wants; heals it."""

from __future__ import annotations

import threading
from pathlib import Path

from delta_weight_sync.heads import NoVersionError
from delta_weight_sync.lookout import Lookout
from delta_weight_sync.protocol import Manifest
from delta_weight_sync.runlog import ReplicaReport
from delta_weight_sync.vllm.engine import Engine, EngineError
from delta_weight_sync.vllm.journal import Journal
from delta_weight_sync.vllm.live_version import LiveVersion
from delta_weight_sync.vllm.orders import Orders
from delta_weight_sync.vllm.progress import CountingReader
from delta_weight_sync.vllm.refusals import RefusedError

_BACKOFF_S = 3.0


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
        self._lookout = Lookout(reader, poll_s)
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
        self._journal.complain(reason, "refused" if refused else None)

    def _turn(self) -> bool:
        """Do what is to be done; False if that was nothing, so that what went wrong before still holds."""
        try:
            self._live.require_alive()
        except EngineError:
            self._lookout.again()
            raise
        held = self.orders.held(self._live.served_last)
        if self.orders.healing.is_set():
            self.orders.healing.clear()
            self._live.refusals.forget()
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
                self._live.become(wanted, held, afresh=True)
            self._heals = False
        except RefusedError:
            self._heals = False
            raise

    def _hold(self, manifest: Manifest) -> None:
        """Serve `manifest`'s version and no other."""
        self._lookout.again()
        if manifest != self.serving or self._journal.error:
            self._live.become(manifest, manifest, afresh=False)

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
            self._live.become(newest, None, afresh=False)
            self._lookout.taken()
        self._journal.passed_over(self._lookout.complaint())
        return True
