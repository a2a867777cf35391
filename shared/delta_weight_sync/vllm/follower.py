"""Keeps one engine at the newest version of a run, or at the version that its owner wants.

A follower is one thread, which watches the bucket, and fetches, stages, commits and reports versions.
Normally the follower applies a version's deltas. If that is not possible, it joins: it builds a checkpoint of
the version on disk (from an anchor, that is a stored checkpoint, and deltas), compares this with the live
parameters, and commits what differs. A join works from any live weights; it is used for the first version, to
heal, and to go back. vLLM generates meanwhile, and the digest of its live parameters proves the result.
"""

import threading
import time
from collections import deque
from pathlib import Path

from delta_weight_sync import errors
from delta_weight_sync.engine import Dtypes, Engine, Shapes, label_of
from delta_weight_sync.reader import RunReader
from delta_weight_sync.records import DeltaRef, Manifest
from delta_weight_sync.runlog import (
    CommitEvent,
    Drafts,
    ReplicaEvent,
    ReplicaReport,
    TrafficEvent,
    traffic_event,
)
from delta_weight_sync.util import Guard, SafeLogger
from delta_weight_sync.vllm.disk import Layout
from delta_weight_sync.watch import FIRST_S, Backoff, Watcher

_LINE_S = 60.0  # between two log lines about served versions
_UNMOVED = 10  # versions in a row that change no quantized weight, before the replica warns
# Kinds of errors by which vLLM refuses a version: a retry would probably fail, too.
_REFUSALS = (errors.RouteError.kind, errors.CommitError.kind, errors.CodecError.kind)
_Tensors = tuple[Shapes, Dtypes]
_NONE: _Tensors = ({}, {})
_log = SafeLogger()


class Commands:
    """The owner's commands. Any thread may call these methods; the follower obeys at its next turn."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self.paused = False
        self.pinned: Manifest | None = None
        self.healing = threading.Event()

    def pause(self) -> None:
        """Stay at the version that is served."""
        self.paused = True
        self.pinned = None

    def resume(self) -> None:
        """Follow the newest version again."""
        self.paused = False
        self.pinned = None

    def pin(self, version: int | str) -> None:
        """Go to `version`, a number or a tag, and stay there. A tag that moves later moves no replica.

        Raises:
            ProtocolError: The run has no such version.
            ConfigError: The text cannot be a tag.
        """
        self.paused, self.pinned = False, self._reader.manifest(version)

    def describe(self) -> str:
        """Why the replica does not follow newer versions; "" if it does."""
        held = f"pinned to version {self.pinned.version}" if self.pinned else "paused" * self.paused
        return held and f"{held}: newer versions wait until you resume this replica"

    def heal(self) -> None:
        """Compare all live weights with the published ones, and write what differs."""
        self.healing.set()


class Follower:
    """Keeps `engine` at the version that the run and the owner want."""

    def __init__(self, reader: RunReader, engine: Engine, *, name: str, folder: Path, poll_s: float) -> None:
        """`folder`: scratch space for one or two checkpoints."""
        self.serving: Manifest | None = None  # its bits are live, proven by digest; any thread may read this
        self.commands = Commands(reader)
        self._reader = reader
        self._engine = engine
        self._folder = folder
        self._poll_s = poll_s
        self._layout, self._watcher = Layout(reader, folder), Watcher(reader, poll_s)
        self._name = name
        self._state = "starting"
        self._logged = ""  # the last logged problem
        self._error: str | None = None
        self._since = time.time()
        self._counting = Guard("the count of bytes and requests")
        self._next_line = 0.0  # when a served version is logged again
        self._signed_by: str | None = None  # the key that signed the served version
        self._commits = deque[CommitEvent](maxlen=256)
        # Delays after a failure to go to the owner's version, after a start of vLLM, and after a failed join.
        self._holding = Backoff()
        self._starting = Backoff()
        self._joining = Backoff()
        self._refusal: errors.EngineError | None = None  # of a failed join
        self._served_last: Manifest | None = None  # like `serving`, but kept while nothing is served
        self._learned = _NONE  # the tensors whose places vLLM knows
        self._healing = False  # whether a heal is still to be done
        self._heal_refusal = ""  # why vLLM refused a heal; reported until the next commit or heal
        self._watching = Guard("the count of draft tokens")
        self._drafted = 0  # draft tokens when the served version was logged
        self._accepted = 0  # of these, the accepted ones
        self._unmoved = 0  # how many of the newest versions changed no quantized weight
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        _log.info("replica %s: follows %s#%s", self._name, self._reader.bucket.url, self._reader.keys.run)
        self._thread.start()

    def stop(self) -> None:
        """Stop following. Also stop vLLM if this follower started it, even if vLLM is still starting."""
        self._stopped.set()
        self._watcher.close()
        while self._thread.is_alive():
            self._engine.stop()
            self._thread.join(0.5)
        self._engine.stop()

    def poke(self) -> None:
        """Look for a new version now."""
        self._watcher.poke()

    @property
    def logprobs_mode(self) -> str:
        """vLLM's option of this name; "" before vLLM runs."""
        return self._engine.sampling()[0]

    @property
    def adapters(self) -> bool:
        """Whether versions are served as adapters, several at a time."""
        return self._engine.adapters

    def report(self, after: int) -> ReplicaReport:
        """What the replica is doing, and its recent commits of versions newer than `after`."""
        serving = self.serving
        progress = "" if serving else self._layout.progress()
        status = ReplicaEvent(
            t=time.time(),
            replica=self._name,
            state=f"{self._state}: {progress}" if progress else self._state,
            version=serving.version if serving else None,
            digest=serving.digest if serving else None,
            error=self._error,
            signed_by=self._signed_by if serving else None,
            quantized=self._engine.quantized if serving else None,
        )
        commits = tuple(commit for commit in list(self._commits) if commit.version > after)
        notice = self.commands.describe() or self._watcher.describe()
        if self._unmoved >= _UNMOVED:
            notice = f"{notice}; {self._warning()}"
        engine = self._engine.describe()
        traffic: TrafficEvent | None = None
        with self._counting:
            traffic = traffic_event(self._reader.bucket.ledger.counts(), self._name, self._since)
        mode, defaults = self._engine.sampling()
        drafts = self._drafts()
        if drafts and drafts.kept:
            notice = f"{notice}; {_outdated(drafts)}"
        return ReplicaReport(
            status=status,
            commits=commits,
            notice=notice,
            engine=engine,
            traffic=traffic,
            logprobs_mode=mode,
            sampling_defaults=defaults,
            drafts=drafts,
        )

    def _drafts(self) -> Drafts | None:
        with self._watching:
            return self._engine.drafts()
        return None

    def _acceptance(self) -> str:
        """The share of accepted draft tokens since the last version, as the end of a line of the log."""
        drafts = self._drafts()
        if not drafts or drafts.drafted is None or drafts.accepted is None:
            return ""
        drafted = drafts.drafted - self._drafted
        accepted = drafts.accepted - self._accepted
        self._drafted = drafts.drafted
        self._accepted = drafts.accepted
        return f", and {accepted} of {drafted} draft tokens were accepted" if drafted > 0 else ""

    def _warning(self) -> str:
        return (
            f"the last {self._unmoved} versions changed no quantized weight, so the policy that is served"
            " hardly moves: choose a finer --quantization, or none"
        )

    def explain(self, error: Exception | None) -> str:
        """Return the text to report for `error` (None: all is well again). A Space overrides this method."""
        if isinstance(error, errors.BucketMissingError) and self.serving is None:
            return f"{error}, or start the trainer, which creates it"
        return f"{error}"

    # Watch: decide which version to serve.

    def _run(self) -> None:
        while not self._stopped.is_set():
            wait_s = self._poll_s
            try:
                if self._turn():
                    self.explain(None)
            except Exception as error:  # noqa: BLE001 - whatever it was, report it, keep serving, try again
                kind = error.kind if isinstance(error, errors.EngineError) and not self.serving else ""
                self._complain(self.explain(error), "refused" if kind in _REFUSALS else self._state)
                wait_s = min(wait_s, FIRST_S)
            self._watcher.wait(wait_s)

    def _turn(self) -> bool:
        """One turn of the loop. False if nothing was tried; the caller then keeps the earlier error."""
        if self.serving is not None and not self._engine.alive():
            self.serving = None
            self._joining.reset()
            self._holding.reset()
            self._watcher.refresh()
            raise errors.EngineError(f"{self._engine.what} died; the lines above say why")
        if self.commands.healing.is_set():
            self.commands.healing.clear()
            for each in (self._joining, self._starting, self._holding):
                each.reset()
            self._watcher.reset()
            self._healing = True
            self._heal_refusal = ""
        held = self._served_last if self.commands.paused else self.commands.pinned
        return self._hold(held) if held else self._follow_newest()

    def _hold(self, manifest: Manifest) -> bool:
        """Serve the version at which the owner holds this replica. False if it is too early to retry."""
        self._watcher.refresh()  # so that the first poll after the hold uses the newest version
        if manifest == self.serving and not (self._error or self._healing):
            return True
        if not self._holding.allows(manifest.seal):
            return False
        try:
            self._reach(manifest, held=True)
        except Exception:
            self._holding.failed(manifest.seal)
            raise
        return True

    def _follow_newest(self) -> bool:
        """Serve the newest version. False if it is too early to look for a version, or to retry one."""
        try:
            taken = self._watcher.check(self._reach)
        except errors.NoVersionError:
            if self.serving:
                raise errors.ObjectMissingError(
                    f"run {self._reader.keys.run!r} is gone from {self._reader.bucket.url}; version"
                    f" {self.serving.version} is still served"
                ) from None
            self._note("waiting for the run's first version")
            return True
        if taken and (problem := self._watcher.problem()):
            self._complain(f"{problem}", "serving")
        elif taken and self._error:
            self._settle()
        return taken

    def _reach(self, manifest: Manifest, held: bool = False) -> None:
        """Serve a version. `held`: whether the owner pinned this version, or paused at it.

        Raises `DeltaWeightSyncError` or `OSError` if that fails. The replica then still serves the version
        that it served before. If it served none, it may serve an older version than `manifest`. If other code
        had changed its weights, or if vLLM was being restarted, it serves none.
        """
        if self.serving is None and not held:
            self._reader.try_older(manifest, self._join)  # an older version is better than none
        elif self.serving is None or self._healing:
            self._join(manifest)
        elif manifest != self.serving:
            self._advance(manifest, self.serving)
        else:
            self._settle()
        self._healing = False

    # By deltas: fetch, stage, commit.

    def _advance(self, manifest: Manifest, serving: Manifest) -> None:
        anchor, deltas = self._reader.recipe(manifest, serving.version)
        unchanged = not any(delta.changed for delta in deltas)
        if anchor or not deltas or (unchanged and manifest.digest != serving.digest):
            self._join(manifest)  # no deltas lead to this version, or they do not explain its digest
            return
        if unchanged:
            self._engine.relabel(label_of(manifest))
            self._serve(manifest)
            return
        try:
            self._apply(manifest, deltas)
        except errors.EngineError as error:
            # A worker that fails keeps its weights. If other code had changed these, they are of no version.
            if error.kind == errors.WeightsChangedError.kind:
                self.serving = None
            failed = f"version {manifest.version} could not be staged or committed"
            self._note(self._state, f"{failed}; this replica now repairs itself: {error}")
            self._join(manifest)

    def _apply(self, manifest: Manifest, deltas: tuple[DeltaRef, ...]) -> None:
        started = time.perf_counter()
        try:
            paths = self._reader.fetch_all(deltas, self._folder)
            fetch_s = time.perf_counter() - started
            times = self._engine.take(paths, manifest.digest, label_of(manifest))
            quantized = self._engine.quantized
            self._unmoved = self._unmoved + 1 if quantized and not quantized.changed else 0
            if self._unmoved == _UNMOVED:
                _log.warning("replica %s: %s", self._name, self._warning())
        finally:
            for delta in deltas:
                (self._folder / delta.name).unlink(missing_ok=True)
        self._serve(manifest, fetch_s, *times)

    # By a join: fetch a checkpoint, stage what differs, commit.

    def _join(self, manifest: Manifest) -> None:
        """Join a version.

        If a join fails while no version is served, or because vLLM refuses the version, perhaps vLLM cannot
        take the model at all. Each try copies a checkpoint. So the next join of any version with the same
        anchor is delayed. During the delay, this method raises the same error again. A new pin ends the
        delay.
        """
        started = time.perf_counter()
        first = self.serving is None
        self._require_kind(manifest)
        wanted = manifest.anchor, self.commands.pinned
        if self._refusal and not self._joining.allows(wanted):
            raise self._refusal
        if first:
            self._note(f"fetching version {manifest.version}")
        if not self._engine.alive():
            self._require_patience(manifest)  # before a checkpoint is written
        folder, shapes, dtypes = self._layout.put(manifest)
        fetch_s = time.perf_counter() - started
        try:
            self._prepare_engine(manifest, folder, (shapes, dtypes))
            times = self._engine.take_checkpoint(folder, manifest.digest, label_of(manifest))
        except errors.EngineError as error:
            if (first or error.kind in _REFUSALS) and not isinstance(error, errors.TooSoonError):
                self._joining.failed(wanted)
                self._refusal = error
            if error.kind not in _REFUSALS:
                self._learned = _NONE  # to learn again gives the workers new process groups
            if self._healing and not first and error.kind in _REFUSALS:  # do not repeat this heal
                self._healing = False
                self._heal_refusal = f"{error}"
            raise
        self._joining.reset()
        for ref in manifest.anchor.weights:
            (folder / ref.name).unlink()  # the weights are live now
        self._serve(manifest, fetch_s, *times, joined=True)

    def _require_kind(self, manifest: Manifest) -> None:
        """Raise `EngineError` if vLLM was not started for what this run publishes."""
        if manifest.anchor.is_adapter == self._engine.adapters:
            return
        what = f"whole weights: start {self._engine.what} without --enable-lora"
        if manifest.anchor.is_adapter:
            what = "an adapter: start vLLM 0.32 or newer with the adapter's base as model, and --enable-lora"
        raise errors.EngineError(f"run {manifest.run!r} publishes {what}", errors.CodecError.kind)

    def _prepare_engine(self, manifest: Manifest, folder: Path, tensors: _Tensors) -> None:
        """Start or restart vLLM if this version needs that; let vLLM learn the places of the tensors.

        Each start of vLLM makes the wait before the next start longer, until a heal or a long quiet time.
        """
        if started := not self._engine.serves(folder):
            self._require_patience(manifest)
            self._starting.failed("vLLM")  # counts as a failure, so that the next start must wait
            self.serving = None
            self._learned = _NONE
            self._note(f"starting {self._engine.what} with version {manifest.version}")
            self._engine.start(folder)
        if tensors != self._learned:
            found = self._engine.learn(*tensors)
            if started and found != manifest.digest:
                self._engine.stop()  # else the next try would find vLLM started, and skip this check
                what = self._engine.what
                raise errors.EngineError(
                    f"{what} loaded weights with digest {manifest.digest}, but the parameters that deltas"
                    f" would change have digest {found}: {what} rearranges this model's weights;"
                    " serve another model",
                    errors.CodecError.kind,
                )
            self._learned = tensors
            if (drafts := self._drafts()) and drafts.kept:
                _log.warning("replica %s: %s", self._name, _outdated(drafts))

    def _require_patience(self, manifest: Manifest) -> None:
        if not self._starting.allows("vLLM"):
            raise errors.TooSoonError(
                f"version {manifest.version} needs a restart of {self._engine.what}, which was started a"
                " short time ago; the replica tries again later"
            )

    # Note what `report` reports.

    def _note(self, state: str, error: str | None = None, line: str = "") -> None:
        """Note the state and the error. If the state changes or an error is over, log the state (or `line`,
        if given). Also log a `line` if nothing was logged here for a minute."""
        if state != self._state or (self._error and not error) or (line and time.time() >= self._next_line):
            _log.info("replica %s: %s", self._name, line or state)
            self._next_line = time.time() + _LINE_S
        self._state = state
        self._error = error
        if state == "serving" and not error:
            self._logged = ""

    def _settle(self) -> None:
        """Note that the wanted version is served."""
        refusal = self._heal_refusal
        self._complain(refusal, "serving") if refusal else self._note("serving")

    def _complain(self, reason: str, state: str) -> None:
        reason = errors.printable(reason)
        if reason != self._logged:
            _log.warning("replica %s: %s", self._name, reason)
        self._note(state, reason)
        self._logged = reason

    def _serve(self, manifest: Manifest, *times: float, joined: bool = False) -> None:
        """Record that a version is served. `times`: fetch, then `Times`; empty if no weight changed."""
        self._heal_refusal = ""
        self._signed_by = self._reader.public_keys.signer(manifest, "the manifest")
        now = time.time()
        fetch_s, stage_s, pause_s, commit_s, live_at = times or (0.0, 0.0, 0.0, 0.0, now)
        event = CommitEvent(
            t=now,
            replica=self._name,
            version=manifest.version,
            digest=manifest.digest,
            lag_s=max(0.0, live_at - manifest.created_at),
            fetch_s=fetch_s,
            stage_s=stage_s,
            pause_ms=1e3 * pause_s,
            commit_ms=1e3 * commit_s,
            joined=joined,
        )
        self._commits.append(event)  # first: a report of this version has its commit, too
        self.serving = self._served_last = manifest
        line = f"serves version {manifest.version}, digest {manifest.digest}{self._acceptance()}"
        self._note("serving", line=line)


def _outdated(drafts: Drafts) -> str:
    return (
        f"the draft ({drafts.method}) keeps the weights that it started with, so vLLM will accept fewer of"
        f" its tokens as training goes on: {drafts.kept}"
    )
