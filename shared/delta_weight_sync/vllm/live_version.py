"""The version whose bits are live in vLLM, and how it becomes another: joined, or by deltas.

Joining is one path, in place: check the wanted version out of the bucket (newest anchor, then deltas), find
what differs from it in the live parameters, and commit that like any delta. vLLM generates meanwhile, and the
digest of its live parameters proves the result.
"""

from __future__ import annotations

import time
from pathlib import Path

from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import DeltaRef, ProtocolError
from delta_weight_sync.store import ObjectMissing
from delta_weight_sync.vllm.engine import Engine, EngineError
from delta_weight_sync.vllm.journal import Journal
from delta_weight_sync.vllm.labels import Label
from delta_weight_sync.vllm.layout import Layout, Shapes
from delta_weight_sync.vllm.progress import CountingReader
from delta_weight_sync.vllm.refusals import Refusals


class LiveVersion:
    """Changed by the follower's thread; `serving` and `progress` may be read by any thread.

    What changes it raises `EngineError`, `ProtocolError` or `BucketError` where it could not: then what was
    served is served still, or nothing is (`serving` is None).
    """

    def __init__(self, reader: CountingReader, engine: Engine, journal: Journal, folder: Path) -> None:
        """`folder` is scratch space."""
        self._reader, self._engine, self._journal, self._folder = reader, engine, journal, folder
        self._layout = Layout(reader, folder)
        self.refusals = Refusals()
        self.serving: Manifest | None = None  # proven by digest
        self.served_last: Manifest | None = None
        self._learned: Shapes = {}
        self._fetching = False

    def progress(self) -> str:
        """How far the download of a first version is, in words, or ""."""
        return self._reader.progress() if self._fetching else ""

    def require_alive(self) -> None:
        """Raise `EngineError` if vLLM died since it was asked last."""
        if self.serving is not None and not self._engine.alive():
            self.serving = None
            self.refusals.forget()
            raise EngineError("vLLM died; the lines above say why")

    def become(self, manifest: Manifest, held: Manifest | None, *, afresh: bool) -> None:
        """Serve a version, comparing all weights if `afresh`; `held` is it if the owner wants no other."""
        self.refusals.ask(manifest, held, self.serving)
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
        """From whatever is live to `manifest`'s version, comparing all weights."""
        started = time.perf_counter()
        folder, shapes = self._lay_out(manifest)
        fetch_s = time.perf_counter() - started
        try:
            self._prepare(manifest, folder, shapes)
            stage_s = self._engine.stage_checkpoint(folder)
            seconds = self._engine.commit(manifest.digest, str(Label.of(manifest)))
        except EngineError as error:
            self.refusals.judge(error)
            raise
        self.refusals.forget()
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
        self.serving = self.served_last = manifest
        self._journal.commit(manifest, *seconds, joined=joined)
        self._journal.note("serving")
